"""What a process looks like right after SGLang has loaded the plugin."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AtLoad:
    """State before any sparse option was seen: hooked functions, dense server arguments, environment."""

    patched: frozenset[str]
    dense_args: Any
    environment: dict[str, str]
