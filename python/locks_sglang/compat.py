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
from .hooks import Hook, needed
from .refusals import REFUSALS, REFUSED_VARIABLES
from .seams import INTERFACE, SEAMS, Seam

TESTED_VERSIONS = ("0.5.17", "0.5.23")
UNKNOWN = "unknown"

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
        (
            *("forward_mode", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc", "rids"),
            "batch_size",
        ),
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
            *("k_scale", "v_scale", "k_scale_float", "v_scale_float"),
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
    seams = has_seams(root)
    checks = [*(check_seams(root) if seams else []), *check_hooks(root, needed(seams))]
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
    return [_check_function(root, hook) for hook in hooks]


def has_seams(root: Path) -> bool:
    """Whether this SGLang has an interface for sparse decode, complete or not."""
    return _find_module(root, INTERFACE)[1] == [INTERFACE.rpartition(".")[2]]


def check_seams(root: Path) -> list[Check]:
    """Check the contracts of the interface: all of it is used, or none."""
    return [_check_function(root, seam) for seam in SEAMS]


def require(checks: list[Check]) -> None:
    """Raise LocksError that lists every broken contract among ``checks``."""
    broken = [check for check in checks if not check.ok]
    if broken:
        lines = "\n".join(f"  {check.name}: {check.detail}" for check in broken)
        raise LocksError(
            f"SGLang {sglang_version()} does not keep the contracts of sparse decode:\n{lines}\n"
            f"Tested: {', '.join(TESTED_VERSIONS)}. Run 'python -m locks_sglang check' for the whole table."
        )


def _check_function(root: Path, hook: Hook | Seam) -> Check:
    function = _find_function(root, hook.target)
    if function is None:
        return Check(hook.target, hook.purpose, False, "not found")
    if function.binding != hook.binding:
        detail = f"is a {function.binding}, expected a {hook.binding}"
        return Check(hook.target, hook.purpose, False, detail)
    if function.parameters[: len(hook.parameters)] != hook.parameters:
        found, expected = ", ".join(function.parameters), ", ".join(hook.parameters)
        return Check(hook.target, hook.purpose, False, f"parameters ({found}), expected ({expected}, ...)")
    return Check(hook.target, hook.purpose, True)


def _check_server_args_fields(root: Path) -> Check:
    """Every refused option must exist, or its refusal would silently never apply."""
    wanted = {"page_size", *(row.field for row in REFUSALS if _is_in(root, row.since))}
    found = _field_names(root, "sglang.srt.server_args.ServerArgs")
    for path in sorted((root / "sglang/srt/arg_groups/fields").glob("*.py")):
        for namespace in _outline(path.resolve()).classes.values():
            found |= namespace.fields
    missing = sorted(wanted - found)
    return Check(
        "sglang.srt.server_args.ServerArgs", "refused options", not missing, _list_missing(missing)
    )


def _check_environment(root: Path) -> Check:
    name = "sglang.srt.environ.Envs"
    found = _class_of(root, name)
    names = found.constants if found else set()
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
    if match:
        return match[1]
    # An editable install of a checkout need not have that file.
    return sglang_version() if _is_installed(root) else UNKNOWN


def _is_installed(root: Path) -> bool:
    try:
        return sglang_root().resolve() == root.resolve()
    except LocksError:
        return False


def _release(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", number)[:3])


def _list_missing(names: list[str]) -> str:
    return f"missing: {', '.join(names)}" if names else ""


@dataclass(frozen=True)
class _Function:
    """What a hook's contract says about a function."""

    binding: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class _Class:
    """What a class declares: methods, annotated fields, class attributes, attributes set on ``self``."""

    methods: dict[str, _Function]
    fields: set[str]
    constants: set[str]
    assigned: set[str]


@dataclass(frozen=True)
class _Outline:
    functions: dict[str, _Function]
    classes: dict[str, _Class]


# Outlines and not syntax trees: those of SGLang's files would hold hundreds of MB in every process.
@lru_cache(maxsize=256)
def _outline(path: Path) -> _Outline:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    classes = {node.name: _class_outline(node) for node in body if isinstance(node, ast.ClassDef)}
    return _Outline(_functions(body, "function"), classes)


def _class_outline(node: ast.ClassDef) -> _Class:
    fields = {item.target for item in node.body if isinstance(item, ast.AnnAssign)}
    constants = [target for item in node.body if isinstance(item, ast.Assign) for target in item.targets]
    assigned = [
        target
        for item in ast.walk(node)
        if isinstance(item, ast.Assign | ast.AnnAssign)
        for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
    ]
    return _Class(
        methods=_functions(node.body, "method"),
        fields={target.id for target in fields if isinstance(target, ast.Name)},
        constants={target.id for target in constants if isinstance(target, ast.Name)},
        assigned={
            target.attr
            for target in assigned
            if isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
        },
    )


def _functions(body: list[ast.stmt], plain: str) -> dict[str, _Function]:
    found: dict[str, _Function] = {}
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = node.args
        names = (a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
        decorators = {item.id for item in node.decorator_list if isinstance(item, ast.Name)}
        binding = next((name for name in ("staticmethod", "classmethod") if name in decorators), plain)
        # The first of overloads, as a reader of the source would find it.
        found.setdefault(node.name, _Function(binding, tuple(names)))
    return found


def _find_module(root: Path, dotted: str) -> tuple[_Outline | None, list[str]]:
    """Outline of the longest module path of ``dotted`` below ``root``, and the names after it."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        base = root.joinpath(*parts[:length])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return _outline(path.resolve()), parts[length:]
    return None, []


def _find_function(root: Path, dotted: str) -> _Function | None:
    outline, names = _find_module(root, dotted)
    if outline is None or not 1 <= len(names) <= 2:
        return None
    if len(names) == 1:
        return outline.functions.get(names[0])
    owner = outline.classes.get(names[0])
    return owner.methods.get(names[1]) if owner else None


def _class_of(root: Path, dotted: str) -> _Class | None:
    outline, names = _find_module(root, dotted)
    return outline.classes.get(names[0]) if outline is not None and names else None


def _method_names(root: Path, dotted: str) -> set[str]:
    found = _class_of(root, dotted)
    return set(found.methods) if found else set()


def _field_names(root: Path, dotted: str) -> set[str]:
    found = _class_of(root, dotted)
    return set(found.fields) if found else set()


def _assigned_names(root: Path, dotted: str) -> set[str]:
    found = _class_of(root, dotted)
    return found.assigned if found else set()
