"""The screen of ``python -m locks_sglang check``: will this machine, this SGLang and this model run?"""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

from locks_kernels import build

from . import __version__, compat
from .config import LocksConfig, LocksError
from .machine import HOPPER, Gpu, Machine
from .model_facts import ModelFacts

HOLDS, BROKEN, UNTESTED = 0, 1, 3
EXIT_STATUS = (
    f"exit status: {HOLDS} sparse decode starts here; {BROKEN} it does not (a contract is broken, there is "
    f"no SGLang, the model is refused, or torch cannot use the GPU); {UNTESTED} nothing stands against it, "
    "but this version of SGLang was not tested and needs --sparse-decode-allow-untested"
)
_LABEL_WIDTH = 11
_NAME_WIDTH = 48
_INDENT = " " * 6


@dataclass(frozen=True)
class Result:
    """Everything that the screen shows; machine and model are None where they were not asked about."""

    version: str
    contracts: list[compat.Check]
    config: LocksConfig
    machine: Machine | None = None
    model: ModelFacts | None = None

    @property
    def tested(self) -> bool:
        return self.version in compat.TESTED_VERSIONS

    @property
    def broken(self) -> list[compat.Check]:
        return [contract for contract in self.contracts if not contract.ok]

    @property
    def refusal(self) -> str | None:
        return self.model.refusal if self.model else None

    @property
    def unusable_gpu(self) -> bool:
        """A GPU is here and this torch cannot use it: the server would not start, or run on the CPU."""
        return self.machine is not None and bool(self.machine.gpus) and not self.machine.torch_sees_gpu

    @property
    def status(self) -> int:
        if self.broken or self.refusal or self.unusable_gpu:
            return BROKEN
        return HOLDS if self.tested else UNTESTED


def check_sources(sources: Path | None) -> tuple[str, list[compat.Check]]:
    """Version and contracts of the installed SGLang, or of the sources in ``sources/sglang``.

    Raises:
        LocksError: there is no SGLang to check.
    """
    root = compat.sglang_root() if sources is None else sources
    if not (root / "sglang").is_dir():
        raise LocksError(f"{root} holds no folder 'sglang'; legal: the folder of an unpacked SGLang wheel")
    found = compat.sglang_version() if sources is None else compat.version_of_sources(root)
    return found, compat.run_checks(root)


def render(result: Result, every_contract: bool = False) -> str:
    """The screen.  Contracts that hold are a number, unless every one is asked for."""
    # Longer lines are hard to read; a terminal that is narrower decides.
    width = max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
    tested = "tested" if result.tested else "NOT tested"
    lines = [f"locks-sglang {__version__} on SGLang {result.version} ({tested})", ""]
    for label, text in _rows(result):
        lines += textwrap.wrap(
            text,
            width,
            initial_indent=f"{label:<{_LABEL_WIDTH}} ",
            subsequent_indent=" " * (_LABEL_WIDTH + 1),
            break_on_hyphens=False,
        )
    lines += [
        _contract(contract, width) for contract in result.contracts if every_contract or not contract.ok
    ]
    lines += ["", *textwrap.wrap(_verdict(result), width)]
    return "\n".join(lines)


def _rows(result: Result) -> list[tuple[str, str]]:
    rows = []
    if result.machine:
        rows += [
            ("software", _software(result.machine)),
            ("GPU", _gpus(result.machine)),
            ("kernels", _kernels(result)),
            ("host memory", _host_memory(result.machine)),
        ]
    if result.model:
        rows += [("model", _model(result.model)), ("summaries", _summaries(result.model, result.config))]
        rows += [("note", result.model.note)] if result.model.note else []
    holding = len(result.contracts) - len(result.broken)
    rows.append(("contracts", f"{holding} of {len(result.contracts)} hold"))
    return rows


def _software(machine: Machine) -> str:
    packages = ", ".join(f"{name} {found or 'none'}" for name, found in machine.packages.items())
    return f"{machine.processor}, Python {machine.python}, {packages}"


def _gpus(machine: Machine) -> str:
    if not machine.gpus:
        return "none; SGLang and sparse decode run on the CPU, for trying them out"
    described: dict[str, int] = {}
    for gpu in machine.gpus:
        text = _gpu(gpu)
        described[text] = described.get(text, 0) + 1
    text = "; ".join(f"{count} x {text}" if count > 1 else text for text, count in described.items())
    if not machine.torch_sees_gpu:
        text += "; but this torch cannot use it (a CPU build, or a driver that is too old for it)"
    elif any(gpu.capability[0] != HOPPER for gpu in machine.gpus):
        text += f"; the kernels were run on sm_{HOPPER}0 only"
    return text


def _gpu(gpu: Gpu) -> str:
    major, minor = gpu.capability
    memory = f"{gpu.memory_mib / 1024:.0f} GiB" if gpu.memory_mib else "memory unknown"
    return f"{gpu.name}, sm_{major}{minor}, {memory}, driver {gpu.driver}"


def _kernels(result: Result) -> str:
    machine = result.machine
    assert machine is not None
    usable = machine.gpus and machine.torch_sees_gpu
    compiler = f"nvcc {machine.nvcc_version or 'of unknown release'} ({machine.nvcc})"
    if not usable:
        missing = machine.kernels_missing
        return "torch on the CPU; CUDA kernels " + (
            f"cannot be compiled here: {missing}" if missing else f"can be compiled by {compiler}"
        )
    if machine.kernels_missing:
        return f"Triton, slower than CUDA: {machine.kernels_missing}"
    if result.model and not result.refusal:
        return f"CUDA, {_compiled(result.model, result.config, machine.gpus[0])}; {compiler}"
    return f"CUDA, compiled at first use; {compiler}"


def _compiled(model: ModelFacts, config: LocksConfig, gpu: Gpu) -> str:
    """How much of what the server will load is in the cache already."""
    from locks_kernels.precompile import libraries

    arch = build.arch_of(gpu.capability)
    wanted = libraries(model.geometry(config))
    ready = sum(build.is_compiled(library, arch) for library in wanted)
    later = "" if ready == len(wanted) else ", the rest at the first start"
    return f"{ready} of {len(wanted)} libraries compiled for sm_{arch}{later}"


def _host_memory(machine: Machine) -> str:
    nodes = [
        f"NUMA node {node.number}: {node.total / 2**30:.0f} GiB, "
        + (f"CPUs {node.cpu_list}" if node.cpu_list else "no CPUs")
        for node in machine.numa
    ]
    limit = "no limit" if machine.memlock is None else f"at most {machine.memlock / 2**20:,.0f} MiB"
    return "; ".join([*nodes, f"locked memory: {limit} (for a host tier)"])


def _model(model: ModelFacts) -> str:
    heads = f"{model.q_heads} query and {model.kv_heads} KV heads"
    rank = f" on each of {model.tp_size} ranks" if model.tp_size > 1 else ""
    return (
        f"{model.name}: {model.layers} layers, {heads}{rank}, head_dim {model.head_dim}, {model.dtype}, "
        f"context {model.context:,}"
    )


def _summaries(model: ModelFacts, config: LocksConfig) -> str:
    if model.refusal:
        return "none, since the model is refused"
    name = model.geometry(config).records
    share = 100 * model.summary_bytes / model.kv_bytes
    million = model.summary_bytes * 1e6 / 2**30
    return (
        f"{name}, page {config.page_size}: {model.summary_bytes:,} bytes a token beside "
        f"{model.kv_bytes:,} of KV ({share:.1f} %), {million:.2f} GiB per million tokens"
    )


def _contract(contract: compat.Check, width: int) -> str:
    """One line a contract that holds; a broken one says on more lines what is wrong and where."""
    mark = "pass" if contract.ok else "FAIL"
    line = f"{mark}  {short_name(contract.name):<{_NAME_WIDTH}}  {contract.purpose}"
    if contract.ok:
        return line if len(line) <= width else line[: width - 3].rstrip(" ,") + "..."
    lines = [line]
    for text in (contract.detail, f"in {contract.name}"):
        lines += textwrap.wrap(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join(lines)


def short_name(target: str) -> str:
    """A dotted path from its class on; the bare name of a module's function."""
    parts = target.split(".")
    classes = [index for index, part in enumerate(parts) if part[:1].isupper()]
    return ".".join(parts[classes[0] if classes else -1 :])


def _verdict(result: Result) -> str:
    if result.broken:
        versions = ", ".join(compat.TESTED_VERSIONS)
        return f"sparse decode does not start on this SGLang; tested: {versions}"
    if result.refusal:
        return f"sparse decode does not start with this model: {result.refusal}"
    if result.unusable_gpu:
        return "sparse decode does not start on this GPU: this torch cannot use it (see GPU above)"
    where = "with this model on this SGLang" if result.model else "on this SGLang"
    condition = "" if result.tested else " with --sparse-decode-allow-untested"
    return f"sparse decode starts {where}{condition}"
