"""What a server runs: a dense backend, or a selector with its record format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """``dense:BACKEND`` or ``SELECTOR[:FORMAT[:BACKEND]]``.

    `selector` is ``dense``, ``locks``, ``quest`` or ``oracle``; `form` the record format, None for the
    server's default; `backend` SGLang's attention backend.
    """

    name: str
    selector: str
    form: str | None
    backend: str

    @property
    def dense(self) -> bool:
        return self.selector == "dense"

    @classmethod
    def parse(cls, name: str, default_backend: str) -> Variant:
        """ValueError names the legal forms."""
        selector, *rest = name.split(":")
        if selector == "dense" and len(rest) == 1:
            return cls(name, selector, None, rest[0])
        if selector in ("locks", "quest", "oracle") and len(rest) <= 2:
            form, backend = (*rest, "", "")[:2]
            return cls(name, selector, form or None, backend or default_backend)
        raise ValueError(f"{name!r} is neither dense:BACKEND nor (locks|quest|oracle)[:FORMAT[:BACKEND]]")

    def flags(self, budget: int) -> list[str]:
        """SGLang's flags for this variant with `budget` tokens attended in every step, however short."""
        flags = ["--attention-backend", self.backend]
        if not self.dense:
            flags += ["--sparse-decode", self.selector, "--sparse-decode-budget", str(budget)]
            flags += ["--sparse-decode-dense-below", "0"]
        if self.form:
            flags += ["--sparse-decode-summary", self.form]
        return flags
