"""Does this SGLang keep the contracts that the hooks rely on?

The checks read source text only, so that they cost no imports at start-up and run as well
on the unpacked wheel of another version.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .config import LocksError
from .hooks import HOOKS, Hook
from .refusals import REFUSALS, REFUSED_VARIABLES

TESTED_VERSIONS = ("0.5.17", "0.5.23")
UNKNOWN = "unknown"

_Function = ast.FunctionDef | ast.AsyncFunctionDef

# Attributes that the plugin reads or sets without hooking them: (class, names).
_METHODS = (
    (
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",
        ("init_forward_metadata", "init_forward_metadata_out_graph", "forward_decode"),
    ),
    (
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
        ("_get_key_buffer", "_get_value_buffer", "set_kv_buffer"),
    ),
    ("sglang.srt.plugins.hook_registry.HookRegistry", ("register", "apply_hooks")),
)
_FIELDS = (
    (
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        ("forward_mode", "req_pool_indices", "seq_lens", "out_cache_loc", "rids"),
    ),
    ("sglang.srt.entrypoints.engine.Engine", ("server_args_class",)),
    ("sglang.srt.entrypoints.engine.SchedulerInitResult", ("scheduler_infos",)),
)
_ASSIGNED = (
    ("sglang.srt.model_executor.model_runner.ModelRunner", ("capture_tail_hooks", "page_size")),
    ("sglang.srt.mem_cache.memory_pool.ReqToTokenPool", ("req_to_token",)),
    (
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter",
        ("forward_ct_decode", "decode_log_interval", "is_stats_logging_rank"),
    ),
    (
        "sglang.srt.layers.radix_attention.RadixAttention",
        (
            *("layer_id", "tp_q_head_num", "head_dim", "v_head_dim", "scaling", "sliding_window_size"),
            *("logit_cap", "is_cross_attention", "use_irope", "attn_type", "xai_temperature_len"),
        ),
    ),
)


@dataclass(frozen=True)
class Check:
    """Outcome of one contract: what was looked at, whether it holds, and what is wrong if not."""

    name: str
    purpose: str
    ok: bool
    detail: str = ""


def sglang_root() -> Path:
    """Folder that holds the installed ``sglang`` package, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise LocksError("SGLang is not installed here; install sglang==" + TESTED_VERSIONS[0])
    return Path(spec.submodule_search_locations[0]).parent


def sglang_version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return UNKNOWN


def check_version(found: str, allow_untested: bool) -> None:
    """Raise LocksError for an SGLang that was not tested, unless the user allows it."""
    if found not in TESTED_VERSIONS and not allow_untested:
        raise LocksError(
            f"SGLang {found} was not tested with locks-sglang; tested: {', '.join(TESTED_VERSIONS)}. "
            "--sparse-decode-allow-untested starts it all the same."
        )


def run_checks(root: Path) -> list[Check]:
    """Check every contract against the sources below ``root`` (the folder of ``sglang``)."""
    checks = check_hooks(root, HOOKS)
    for kind, rows, names_of in (
        ("method", _METHODS, _method_names),
        ("field", _FIELDS, _field_names),
        ("attribute", _ASSIGNED, _assigned_names),
    ):
        for target, wanted in rows:
            found = names_of(root, target)
            missing = [name for name in wanted if name not in found]
            checks.append(
                Check(target, f"{kind}s {', '.join(wanted)}", not missing, _list_missing(missing))
            )
    return [*checks, _check_server_args_fields(root), _check_environment(root)]


def check_hooks(root: Path, hooks: tuple[Hook, ...]) -> list[Check]:
    """Check the contracts of some hooks alone."""
    return [_check_hook(root, hook) for hook in hooks]


def require(checks: list[Check]) -> None:
    """Raise LocksError that lists every broken contract among ``checks``."""
    broken = [check for check in checks if not check.ok]
    if broken:
        lines = "\n".join(f"  {check.name}: {check.detail}" for check in broken)
        raise LocksError(
            f"SGLang {sglang_version()} does not keep the contracts of sparse decode:\n{lines}\n"
            f"Tested: {', '.join(TESTED_VERSIONS)}. Run 'python -m locks_sglang check' for the whole table."
        )


def _check_hook(root: Path, hook: Hook) -> Check:
    function, in_class = _find_function(root, hook.target)
    if function is None:
        return Check(hook.target, hook.purpose, False, "not found")
    binding = _binding_of(function, in_class)
    if binding != hook.binding:
        return Check(hook.target, hook.purpose, False, f"is a {binding}, expected a {hook.binding}")
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if tuple(names[: len(hook.parameters)]) != hook.parameters:
        expected = ", ".join(hook.parameters)
        return Check(
            hook.target, hook.purpose, False, f"parameters ({', '.join(names)}), expected ({expected}, ...)"
        )
    return Check(hook.target, hook.purpose, True)


def _check_server_args_fields(root: Path) -> Check:
    """Every refused option must exist, or its refusal would silently never apply."""
    wanted = {"page_size", *(row.field for row in REFUSALS if _is_in(root, row.since))}
    found = _field_names(root, "sglang.srt.server_args.ServerArgs")
    for path in sorted((root / "sglang/srt/arg_groups/fields").glob("*.py")):
        for node in ast.walk(_parse(path.resolve())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    missing = sorted(wanted - found)
    return Check(
        "sglang.srt.server_args.ServerArgs", "refused options", not missing, _list_missing(missing)
    )


def _check_environment(root: Path) -> Check:
    name = "sglang.srt.environ.Envs"
    found = _class_of(root, name)
    targets = (
        [t for node in found.body if isinstance(node, ast.Assign) for t in node.targets] if found else []
    )
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    wanted = [row.name for row in REFUSED_VARIABLES if _is_in(root, row.since)]
    missing = [variable for variable in wanted if variable not in names]
    return Check(name, "refused environment variables", not missing, _list_missing(missing))


def _is_in(root: Path, since: str) -> bool:
    """Whether the sources below ``root`` are of version ``since`` or later; unknown ones count as later."""
    found = version_of_sources(root)
    return found == UNKNOWN or _release(found) >= _release(since)


def version_of_sources(root: Path) -> str:
    """Version that the sources below ``root`` state, ``unknown`` where they state none."""
    path = root / "sglang" / "_version.py"
    match = (
        re.search(r"^__version__ = version = '([^']+)'", path.read_text(), re.M) if path.is_file() else None
    )
    return match[1] if match else UNKNOWN


def _release(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", number)[:3])


def _list_missing(names: list[str]) -> str:
    return f"missing: {', '.join(names)}" if names else ""


@lru_cache(maxsize=256)
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _module_file(root: Path, dotted: str) -> tuple[Path | None, list[str]]:
    """Longest module path of ``dotted`` that exists below ``root``, and the names after it."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        base = root.joinpath(*parts[:length])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path.resolve(), parts[length:]
    return None, []


def _find_function(root: Path, dotted: str) -> tuple[_Function | None, bool]:
    path, names = _module_file(root, dotted)
    if path is None or not names:
        return None, False
    body: list[ast.stmt] = _parse(path).body
    for name in names[:-1]:
        found = _find_class(body, name)
        if found is None:
            return None, False
        body = found.body
    for node in body:
        if isinstance(node, _Function) and node.name == names[-1]:
            return node, len(names) > 1
    return None, False


def _find_class(body: list[ast.stmt], name: str) -> ast.ClassDef | None:
    return next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _class_of(root: Path, dotted: str) -> ast.ClassDef | None:
    path, names = _module_file(root, dotted)
    return _find_class(_parse(path).body, names[0]) if path is not None and names else None


def _binding_of(function: _Function, in_class: bool) -> str:
    decorators = {d.id for d in function.decorator_list if isinstance(d, ast.Name)}
    for binding in ("staticmethod", "classmethod"):
        if binding in decorators:
            return binding
    return "method" if in_class else "function"


def _method_names(root: Path, dotted: str) -> set[str]:
    found = _class_of(root, dotted)
    return {node.name for node in found.body if isinstance(node, _Function)} if found else set()


def _field_names(root: Path, dotted: str) -> set[str]:
    found = _class_of(root, dotted)
    if found is None:
        return set()
    return {
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _assigned_names(root: Path, dotted: str) -> set[str]:
    """Names that the class's methods assign on ``self``."""
    found = _class_of(root, dotted)
    if found is None:
        return set()
    targets = [
        target
        for node in ast.walk(found)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return {
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }
