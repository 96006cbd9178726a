"""``python -m locks_sglang``, and the command ``locks-sglang``."""

import sys


def main() -> int:
    """The command line; without torch, the import of which fails, what to do instead."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = f"locks-sglang needs torch, which is not installed for {sys.executable}"
        print(f"{message}; use the Python that runs SGLang", file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
