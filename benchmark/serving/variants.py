"""What a server runs: a dense backend, or a selector with its record format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """``dense:BACKEND`` or ``SELECTOR[:FORMAT[:BACKEND]]``, where ``host`` is ``locks`` from host memory.

    `selector` is ``dense``, ``locks``, ``quest`` or ``oracle``; `form` the record format, None for the
    server's default; `backend` SGLang's attention backend; `tier` where the KV cache lies.
    """

    name: str
    selector: str
    form: str | None
    backend: str
    tier: str = "resident"

    @property
    def dense(self) -> bool:
        return self.selector == "dense"

    @classmethod
    def parse(cls, name: str, default_backend: str) -> Variant:
        """ValueError names the legal forms."""
        selector, *rest = name.split(":")
        if selector == "dense" and len(rest) == 1:
            return cls(name, selector, None, rest[0])
        if selector in ("locks", "quest", "oracle", "host") and len(rest) <= 2:
            form, backend = (*rest, "", "")[:2]
            tier = "host" if selector == "host" else "resident"
            selector = "locks" if selector == "host" else selector
            return cls(name, selector, form or None, backend or default_backend, tier)
        raise ValueError(
            f"{name!r} is neither dense:BACKEND nor (locks|quest|oracle|host)[:FORMAT[:BACKEND]]"
        )

    def flags(
        self, budget: int | None = None, host_gib: float | None = None, always_sparse: bool = False
    ) -> list[str]:
        """SGLang's flags for this variant, with `budget` tokens attended per KV head (None: the default).

        `host_gib` is the host memory of a host variant's KV cache; None: the server decides. With
        `always_sparse` steps that leave little out select pages, too, which a server runs dense by default.
        """
        flags = ["--attention-backend", self.backend]
        if not self.dense:
            flags += ["--sparse-decode", self.selector]
            flags += ["--sparse-decode-budget", str(budget)] if budget else []
            flags += ["--sparse-decode-dense-below", "0"] if always_sparse else []
        if self.tier == "host":
            flags += ["--sparse-decode-kv-tier", "host"]
            flags += ["--sparse-decode-host-gib", str(host_gib)] if host_gib else []
        if self.form:
            flags += ["--sparse-decode-summary", self.form]
        return flags
