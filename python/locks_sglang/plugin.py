"""The entry point that SGLang calls in every process that loads plugins."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from . import compat
from .activation import enable_process, inherited_config, register_hooks
from .config import LocksConfig
from .hooks import hooks_for


def register() -> None:
    """Add the flags; in a scheduler process of a sparse server, install sparse decode too.

    An exception on the way to the flags is logged by SGLang and leaves it without them, so
    that ``--sparse-decode`` is refused as unknown.  In a scheduler process the user has
    asked for sparse decode, and anything that goes wrong ends the process.

    An SGLang with seams gets a method and no hooks; it ends a server by itself whose
    method is unknown.
    """
    if compat.has_seams(compat.sglang_root()):
        _register_methods()
        return
    is_scheduler = "sglang.srt.managers.scheduler" in sys.modules
    config = inherited_config() if is_scheduler else LocksConfig()
    if not config.enabled:
        _add_flags()
        return
    try:
        _add_flags()
        enable_process(config, "scheduler")
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(f"sparse decode could not start: {error}") from error


def _register_methods() -> None:
    compat.require(compat.check_seams(compat.sglang_root()))
    from . import method

    method.register_methods()
    _accept_engine_arguments(method.engine_server_args_class)


def _add_flags() -> None:
    hooks = hooks_for("every")
    # These alone: a server without sparse decode must not wait for the whole table.
    compat.require(compat.check_hooks(compat.sglang_root(), hooks))
    register_hooks(hooks)
    _accept_engine_arguments()


def _accept_engine_arguments(stand_in: Callable[[Callable], staticmethod] | None = None) -> None:
    """Let ``sgl.Engine(sparse_decode=...)`` take our arguments, where the engine is imported."""
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is None:
        return
    if stand_in is None:
        from . import parent_hooks

        stand_in = parent_hooks.engine_server_args_class
    engine.Engine.server_args_class = stand_in(engine.Engine.server_args_class)
