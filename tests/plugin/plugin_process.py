"""What a process looks like right after SGLang has loaded the plugin."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from locks_sglang.refusals import resolved


def resolve(server_args: Any) -> Any:
    """Server arguments as a server has them: 0.5.17 resolves them when it parses, 0.5.23 when asked to."""
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    return server_args


def changeable(server_args: Any) -> SimpleNamespace:
    """A copy of server arguments as they are resolved, in which a test may set fields."""
    view = resolved(server_args)
    # Those of 0.5.23 are no dataclass.
    names = getattr(server_args, "__struct_fields__", None) or vars(server_args)
    return SimpleNamespace(**{name: getattr(view, name) for name in names})


def change(server_args: Any, **values: Any) -> None:
    """Change resolved arguments as code that embeds SGLang may."""
    if hasattr(server_args, "override"):
        server_args.override(source="test", **values)
    else:
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(server_args, "test", **values)


@dataclass(frozen=True)
class AtLoad:
    """State before any sparse option was seen: hooked functions, dense server arguments, environment."""

    patched: frozenset[str]
    dense_args: Any
    environment: dict[str, str]
