"""Serve a model with sparse decode and show that it works: one question about a document, what was read.

Starts ``python -m sglang.launch_server --sparse-decode locks``, waits until it is healthy, asks about
docs/demo/handbook.md (2,400 tokens) with a budget of 512, prints the answer and what was selected, and
serves until Ctrl-C. Options after ``--`` go to SGLang as they are. ``make serve`` runs this.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any, NoReturn

import benchmark_path  # noqa: F401
import requests
from locks_sglang import cpu_stand_ins
from locks_sglang.demo_model import DEFAULT_OUT
from serving import process as server_process
from serving.process import ServerFailed

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs/demo/handbook.md"
QUESTION = "What lowest pressure was ever read on the barometer?"
NEXT_QUESTION = "What is the station cat called?"
GPU_FLAGS = ("--page-size", "16", "--cuda-graph-max-bs", "8", "--enable-cache-report")
# Times what a start takes on two CPU cores.
START_TIMEOUT_S = 600
LOCALHOST = "127.0.0.1"


def main() -> int:
    """Exit status: 0 after an answer, 1 when the server did not start or the answer could not be had."""
    args = parse_arguments()
    port = args.port if is_free(args.port) else free_port()
    if port != args.port:
        print(f"serve: port {args.port} is in use, taking {port}")
    url = f"http://{LOCALHOST}:{port}"
    command = server_command(args, port)
    print(f"serve: {shlex.join(command)}", flush=True)
    # Being ended from outside must not leave the server behind either.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    env = dict(os.environ) if has_gpu() else cpu_stand_ins.environment()
    with tempfile.TemporaryDirectory(prefix="locks-serve-") as folder:
        log_path = Path(folder) / "server.log"
        with server_process.running(command, log_path, env) as process:
            try:
                wait_until_healthy(url, process, log_path)
                show_answer(url)
                show_next_request(url, args.model)
                if args.once:
                    return 0
                print(f"\nserve: serving on {url} until Ctrl-C; log: {log_path}", flush=True)
                return process.wait()
            except KeyboardInterrupt:
                print("\nserve: stopping")
                return 0
            except requests.RequestException as error:
                fail(f"the request failed: {error}", log_path)
            except ServerFailed as error:
                fail(error.reason, log_path)
            finally:
                # A second signal, as make sends one, must not cut the stop short.
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=str(DEFAULT_OUT), help="model folder or name (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=30000, help="another is taken where this one is in use")
    parser.add_argument(
        "--selector", default="locks", help="value of --sparse-decode (default: %(default)s)"
    )
    parser.add_argument("--budget", type=int, default=512, help="tokens attended (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="stop after the answer instead of serving on")
    parser.add_argument("flags", nargs="*", help="further SGLang options, after --")
    return parser.parse_args()


def server_command(args: argparse.Namespace, port: int) -> list[str]:
    """The command that a user would type, with a sparse budget; every step is audited."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", args.model]
    command += ["--host", LOCALHOST, "--port", str(port), "--enable-metrics"]
    # The demo's request is short, so that a GPU would run its steps dense.
    command += ["--sparse-decode", args.selector, "--sparse-decode-dense-below", "0"]
    if args.selector != "off":
        command += ["--sparse-decode-budget", str(args.budget)]
        # All layers: the first ones alone keep far less than the mean.
        command += ["--sparse-decode-audit-interval", "1", "--sparse-decode-audit-layers", "1000"]
    command += GPU_FLAGS if has_gpu() else (*cpu_stand_ins.SERVER_FLAGS, "--sleep-on-idle")
    return [*command, *args.flags]


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def wait_until_healthy(url: str, process: Popen[bytes], log_path: Path) -> None:
    begun = time.monotonic()

    def waited() -> str:
        return f"{time.monotonic() - begun:.0f} s"

    def report() -> None:
        report_progress(f"serve: starting, {waited()}; {last_line(log_path)}")

    server_process.wait_until_healthy(url, process, log_path, START_TIMEOUT_S, report)
    report_progress("")
    print(f"serve: healthy after {waited()}", flush=True)


def report_progress(text: str) -> None:
    """A line that is overwritten; nothing where the output is not a terminal."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text[:110]}", end="", flush=True)


def last_line(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").splitlines()
    return lines[-1].strip() if lines else ""


def show_answer(url: str) -> None:
    before = locks_section(url)
    print(f"\ndocument: {DOCUMENT.relative_to(ROOT)}\nquestion: {QUESTION}\nanswer:   ", end="", flush=True)
    begun = time.monotonic()
    usage: dict[str, Any] = {}
    for piece, usage_now in stream_chat(url, QUESTION):
        print(piece, end="", flush=True)
        usage = usage_now or usage
    counts = f"{usage.get('prompt_tokens')} prompt tokens, {usage.get('completion_tokens')} generated"
    print(f"\n          {counts}, {time.monotonic() - begun:.1f} s in all\n")
    show_selection(before, locks_section(url))


def question_body(question: str) -> dict[str, Any]:
    prompt = f"{DOCUMENT.read_text()}\n\nQuestion: {question}\nAnswer in one sentence."
    return {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 48}


def stream_chat(url: str, question: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Pieces of the answer as they arrive, each with the usage where the server sends it."""
    body = {**question_body(question), "stream": True, "stream_options": {"include_usage": True}}
    with requests.post(f"{url}/v1/chat/completions", json=body, stream=True, timeout=600) as answer:
        if not answer.ok:
            raise requests.HTTPError(f"{answer.status_code}: {answer.text}")
        for line in answer.iter_lines():
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            event = json.loads(line[len(b"data: ") :])
            choices = event.get("choices") or [{}]
            yield choices[0].get("delta", {}).get("content") or "", event.get("usage")


def locks_section(url: str) -> dict[str, Any]:
    """The plugin's part of /server_info; empty where sparse decode is off."""
    info = requests.get(f"{url}/server_info", timeout=60).json()
    return info["internal_states"][0].get("locks", {})


def show_selection(before: dict[str, Any], after: dict[str, Any]) -> None:
    """What this one answer read, from the counters before and after it."""
    if not after:
        print("selected: everything (sparse decode is off)")
        return

    def since(name: str) -> int:
        return after[name] - before[name]

    attended, available = since("pages_attended"), since("pages_available")
    share = f" ({100 * attended / available:.0f} %)" if available else ""
    mass = after.get("retained_mass")
    print(
        f"selected: by {after['selector']}, records {after['format']}, {after['bytes_per_token']} B a token"
    )
    print(f"          pages attended: {attended} of {available} available{share}, per layer and KV head")
    print(f"          decode rows:    {since('rows_sparse')} sparse, {since('rows_dense')} dense")
    print(f"          retained mass:  {'not audited' if mass is None else f'{mass:.4f}'} of the attention")
    print(f"          summaries:      {after['summary_bytes'] / 2**20:.1f} MiB beside the KV pool")


def show_next_request(url: str, model: str) -> None:
    body = json.dumps({"model": model, **question_body(NEXT_QUESTION)}, indent=None)
    body_path = ROOT / ".models" / "next-request.json"
    body_path.parent.mkdir(exist_ok=True)
    body_path.write_text(body)
    short = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 32,
        }
    )
    print(f"""
another question about the same document ({NEXT_QUESTION}):
  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d @{body_path}
any other request:
  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(short)}""")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCALHOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        return probe.getsockname()[1]


def fail(reason: str, log_path: Path) -> NoReturn:
    """Keep the log where the user can read it, show its end, and exit."""
    kept = Path(tempfile.gettempdir()) / "locks-serve-failed.log"
    text = log_path.read_text(errors="replace")
    kept.write_text(text)
    report_progress("")
    print("\n".join(line[:300] for line in text.splitlines()[-25:]), file=sys.stderr)
    print(f"serve: {reason}; the whole log: {kept}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    raise SystemExit(main())
