"""Hooks of the process that parses the arguments and serves the requests."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .activation import attach, config_of, enable_process, inherited_config
from .config import DEFAULT_PAGE_SIZE, LocksConfig, LocksError, add_arguments
from .policy import parse_request
from .refusals import check_server_args as check_refusals


def add_cli_args(_: None, parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)


def from_cli_args(original: Callable, cls: type, args: argparse.Namespace) -> Any:
    """Build the server arguments with our configuration attached."""
    try:
        config = _prepare(LocksConfig.from_namespace(args), args.page_size)
        args.page_size = config.page_size if config.enabled else args.page_size
        return _finish(original(cls, args), config)
    except LocksError as error:
        raise SystemExit(f"error: {error}") from None


def engine_server_args_class(original: Callable) -> staticmethod:
    """Stand in for ``Engine.server_args_class``: takes ``sparse_decode*`` arguments as well."""

    def build(**kwargs: Any) -> Any:
        config = _prepare(LocksConfig.take_from_kwargs(kwargs), kwargs.get("page_size"))
        if config.enabled:
            kwargs["page_size"] = config.page_size
        return _finish(original(**kwargs), config)

    return staticmethod(build)


def _prepare(config: LocksConfig, page_size: int | None) -> LocksConfig:
    """Validate the options and hook this process; a no-op where sparse decode is off."""
    if not config.enabled:
        return config
    config = replace(config, page_size=page_size or DEFAULT_PAGE_SIZE)
    config.validate()
    enable_process(config, "parent")
    return config


def _finish(server_args: Any, config: LocksConfig) -> Any:
    attach(server_args, config)
    check_server_args(None, server_args)
    return server_args


def check_server_args(_: None, server_args: Any) -> None:
    """Refuse what sparse decode does not work with, before any process starts."""
    config = config_of(server_args)
    if config.enabled:
        check_refusals(server_args, config)


def verify_sampling_params(_: None, params: Any, vocab_size: int) -> None:
    """Refuse wrong per-request options; SGLang answers a ValueError here with status 400."""
    config = inherited_config()
    if config.enabled:
        parse_request(params.custom_params, config)
        beams = getattr(params, "beam_width", None)  # SGLang 0.5.23 and later
        if beams is not None and beams > 1:
            raise LocksError(
                f"beam_width is {beams}, but beams share pages in a way that --sparse-decode does not "
                "follow; legal: 1"
            )


def launch_subprocesses(result: Any, cls: type, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Handshake: every scheduler must report that it decodes sparse, or the server ends."""
    config = config_of(server_args)
    if not config.enabled:
        return
    infos = [info for part in result for info in getattr(part, "scheduler_infos", ())]
    silent = [str(rank) for rank, info in enumerate(infos) if "locks" not in info]
    if silent or not infos:
        from sglang.srt.utils import kill_process_tree

        kill_process_tree(os.getpid(), include_parent=False)
        who = (
            f"the schedulers of ranks {', '.join(silent)} run without it"
            if infos
            else "no scheduler reported"
        )
        raise SystemExit(
            f"error: --sparse-decode {config.selector} was asked for, but {who} (was locks-sglang "
            "loaded there? see SGLANG_PLUGINS and the log above)"
        )
