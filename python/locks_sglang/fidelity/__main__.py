"""``python -m locks_sglang.fidelity``: retained mass and recall of page selectors on a real model."""

from __future__ import annotations

import argparse
import hashlib
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch

from . import report
from .auto_budget import AutoStudy
from .capture import Capture, capture, load_model
from .experiments import TABLES, Study
from .forced_decode import FORMAT, decode_rows
from .quantised import KVStudy

BUDGETS = (64, 128, 256, 512, 1024, 2048)
STUDIES = {
    "tables": "the paper's tables on selectors (the default)",
    "kv": "quantised KV caches, section 5.4",
    "auto": "budgets by estimated mass against fixed ones",
}


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    source, made_from = _Source(args), report.commit()
    rows = {"tables": _tables, "kv": _kv, "auto": _auto}[args.study](source, args)
    if args.out:
        about = {
            "model": Path(args.model).name,
            "texts": source.tokens,
            "calibration": source.calibration_tokens,
            "queries": args.queries,
            "stride": args.stride,
        }
        name = "fidelity" if args.study == "tables" else f"fidelity_{args.study}"
        report.save(rows, about, args.out, name, made_from)
    return 0


def _tables(source: _Source, args: argparse.Namespace) -> list[dict]:
    calibration = source.calibration()
    study = Study(args.budgets, args.tables)
    for name, captured, layer in source.layers():
        study.add_layer(captured, layer, name, calibration)
    rows = study.rows()
    print(report.table(rows))
    if args.plot:
        report.plot(rows, args.plot)
    return rows


def _kv(source: _Source, args: argparse.Namespace) -> list[dict]:
    study = KVStudy(args.budgets)
    for name, captured, layer in source.layers():
        study.add_layer(captured, layer, name)
    rows = study.rows()
    print(report.kv_table(rows))
    return rows


def _auto(source: _Source, args: argparse.Namespace) -> list[dict]:
    study = AutoStudy()
    study.calibrate(source.calibration())
    decoded: list[dict] = []
    for name, captured, layer in source.layers():
        study.add_layer(captured, layer, name)
        if layer == captured.layers - 1 and args.decode_tokens:
            ids = source.token_ids(source.path(name))
            decoded += decode_rows(
                source.model, ids, captured, args.decode_tokens, name, study.calibration[FORMAT]
            )
    rows = study.rows() + decoded
    print(report.auto_table(rows))
    return rows


class _Source:
    """The model and what it makes of the texts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model, self.tokenizer = load_model(args.model, args.device)
        self.tokens: dict[str, int] = {}
        self.calibration_tokens: dict[str, int] = {}

    def calibration(self) -> Capture:
        path = self.args.calibration
        captured = self.capture(path)
        self.calibration_tokens[path.name] = captured.tokens
        return captured

    def layers(self) -> Iterator[tuple[str, Capture, int]]:
        """Every layer of every text, with progress."""
        from tqdm import tqdm

        layers = self.model.config.num_hidden_layers
        with tqdm(total=len(self.args.text) * layers, unit="layer") as progress:
            for path in self.args.text:
                progress.set_description(f"{path.name}: capture")
                captured = self.capture(path)
                self.tokens[path.name] = captured.tokens
                progress.set_description(f"{path.name}: {captured.tokens} tokens")
                for layer in range(layers):
                    yield path.name, captured, layer
                    progress.update()

    def path(self, name: str) -> Path:
        return next(path for path in self.args.text if path.name == name)

    def token_ids(self, path: Path) -> list[int]:
        text = path.read_text(encoding="utf-8", errors="replace")
        return self.tokenizer(text[: 8 * self.args.tokens])["input_ids"][: self.args.tokens]

    @torch.inference_mode()
    def capture(self, path: Path) -> Capture:
        """The text's capture, from ``--captures`` where it is there."""
        ids, args = self.token_ids(path), self.args
        if args.captures is None:
            return capture(self.model, ids, args.queries, args.stride)
        setting = (str(Path(args.model).resolve()), ids, args.queries, args.stride)
        file = args.captures / f"{hashlib.sha256(pickle.dumps(setting)).hexdigest()[:16]}.pt"
        if not file.exists():
            args.captures.mkdir(parents=True, exist_ok=True)
            torch.save(vars(capture(self.model, ids, args.queries, args.stride)), file)
        return Capture(**torch.load(file))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m locks_sglang.fidelity", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder of a RoPE decoder")
    parser.add_argument(
        "--text", type=Path, nargs="+", required=True, help="text files; each is cut to --tokens"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        help="another text file, for bases of global scope and calibrated budgets; studies tables and auto",
    )
    parser.add_argument(
        "--tokens", type=int, default=7000, help="tokens of each text (default %(default)s)"
    )
    parser.add_argument(
        "--queries", type=int, default=32, help="positions judged a text (default %(default)s)"
    )
    parser.add_argument("--stride", type=int, default=8, help="tokens between them (default %(default)s)")
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=BUDGETS, help="attended tokens (default %(default)s)"
    )
    parser.add_argument(
        "--study",
        choices=STUDIES,
        default="tables",
        help="; ".join(f"{name}: {text}" for name, text in STUDIES.items()),
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="default: all")
    parser.add_argument(
        "--decode-tokens",
        type=int,
        default=128,
        help="study auto: tokens decoded a text, 0 for none (default %(default)s)",
    )
    parser.add_argument(
        "--captures", type=Path, help="folder that keeps captured keys between runs (default: not kept)"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="for the model"
    )
    parser.add_argument("--out", type=Path, help="results file, JSON")
    parser.add_argument("--plot", type=Path, help="study tables: picture of mass and recall against budget")
    args = parser.parse_args(argv)
    if args.study != "kv" and args.calibration is None:
        parser.error(f"--study {args.study} needs --calibration, a text file beside those of --text")
    names = [path.name for path in args.text]
    if len(set(names)) < len(names):
        parser.error(f"--text is {', '.join(names)}; legal: files of different names")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
