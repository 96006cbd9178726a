"""``python -m locks_sglang.fidelity``: retained mass and recall of page selectors on a real model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from . import report
from .capture import Capture, capture, load_model
from .experiments import TABLES, Study

BUDGETS = (64, 128, 256, 512, 1024, 2048)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    model, tokenizer = load_model(args.model, args.device)
    study = Study(args.budgets, args.tables)
    calibration = _capture(model, tokenizer, args.calibration, args)
    texts = {}
    for path, captured, layer in _layers(model, tokenizer, args):
        study.add_layer(captured, layer, path.name, calibration)
        texts[path.name] = captured.tokens
    rows = study.rows()
    print(report.table(rows))
    if args.out:
        about = {
            "model": Path(args.model).name,
            "texts": texts,
            "calibration": {args.calibration.name: calibration.tokens},
            "queries": args.queries,
            "stride": args.stride,
        }
        report.save(rows, about, args.out)
    if args.plot:
        report.plot(rows, args.plot)
    return 0


def _layers(model, tokenizer, args: argparse.Namespace) -> Iterator[tuple[Path, Capture, int]]:
    """Every layer of every text, with progress."""
    from tqdm import tqdm

    layers = model.config.num_hidden_layers
    with tqdm(total=len(args.text) * layers, unit="layer") as progress:
        for path in args.text:
            progress.set_description(f"{path.name}: capture")
            captured = _capture(model, tokenizer, path, args)
            progress.set_description(f"{path.name}: {captured.tokens} tokens")
            for layer in range(layers):
                yield path, captured, layer
                progress.update()


@torch.inference_mode()
def _capture(model, tokenizer, path: Path, args: argparse.Namespace) -> Capture:
    text = path.read_text(encoding="utf-8", errors="replace")
    ids = tokenizer(text[: 8 * args.tokens])["input_ids"][: args.tokens]
    return capture(model, ids, args.queries, args.stride)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m locks_sglang.fidelity", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder of a RoPE decoder")
    parser.add_argument(
        "--text", type=Path, nargs="+", required=True, help="text files; each is cut to --tokens"
    )
    parser.add_argument(
        "--calibration", type=Path, required=True, help="another text file, for the bases with global scope"
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
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="default: all")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="for the model"
    )
    parser.add_argument("--out", type=Path, help="results file, JSON")
    parser.add_argument("--plot", type=Path, help="picture of mass and recall against budget")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
