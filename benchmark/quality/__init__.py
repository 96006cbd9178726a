"""Task quality of served models with lm-evaluation-harness: what is run, how, and the paper's numbers."""
