"""Servers to measure: start them, load them with SGLang's own benchmark, read what they report."""
