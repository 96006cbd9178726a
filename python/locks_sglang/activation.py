"""Switching sparse decode on in a process, and carrying the configuration to the next one.

SGLang logs a plugin's exceptions and goes on, so a broken plugin would serve dense under a
sparse label.  Everything here therefore ends in an exception that SGLang does not catch.
"""

from __future__ import annotations

import json
import os
from pkgutil import resolve_name
from typing import Any

from . import compat
from .config import LocksConfig
from .hooks import Hook, Process, hooks_for

# Scheduler processes load plugins before they get their arguments; this reaches them by then.
_ENVIRONMENT = "LOCKS_SGLANG_CONFIG"
_ATTRIBUTE = "_locks_config"


def register_hooks(hooks: tuple[Hook, ...]) -> None:
    """Wrap the hooked functions and assert that SGLang really did it.

    Raises:
        RuntimeError: a hook could not be applied.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        registered = [handler for _, handler, _ in HookRegistry._hooks.get(hook.target, [])]
        handler = resolve_name(hook.handler)
        if handler not in registered:
            HookRegistry.register(hook.target, handler, HookType(hook.kind))
    HookRegistry.apply_hooks()
    failed = [hook.target for hook in hooks if hook.target not in HookRegistry._patched]
    if failed:
        raise RuntimeError(f"sparse decode could not hook {', '.join(failed)}; see the log above")


def enable_process(config: LocksConfig, process: Process) -> None:
    """Check version and contracts and register this process's hooks."""
    root = compat.sglang_root()
    compat.check_version(compat.sglang_version(), config.allow_untested)
    compat.require(compat.run_checks(root))
    register_hooks(hooks_for(process, compat.has_seams(root)))


def attach(server_args: Any, config: LocksConfig) -> None:
    """Send the configuration along with ``server_args`` to every process of the server."""
    # A plain dictionary: processes without the plugin must be able to unpickle it.
    setattr(server_args, _ATTRIBUTE, config.to_dict())
    if config.enabled:
        os.environ[_ENVIRONMENT] = json.dumps(config.to_dict())
    else:
        os.environ.pop(_ENVIRONMENT, None)


def config_of(server_args: Any) -> LocksConfig:
    """Configuration that :func:`attach` sent along; off where there is none."""
    return LocksConfig.from_dict(getattr(server_args, _ATTRIBUTE, {}))


def inherited_config() -> LocksConfig:
    """Configuration of the server that started this process; off where there is none."""
    return LocksConfig.from_dict(json.loads(os.environ.get(_ENVIRONMENT, "{}")))
