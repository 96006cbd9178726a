"""Compile all CUDA variants that the GPU tests use, several at a time: python tests/kernels/prebuild.py"""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

from locks_kernels import build

ATTEND = [
    *(
        {"HEAD_DIM": 128, "PAGE": 16, "KV_TYPE": 0, "Q_TYPE": q, "HEAD_TILES": n}
        for q, n in ((0, 1), (0, 2))
    ),
    {"HEAD_DIM": 64, "PAGE": 32, "KV_TYPE": 1, "Q_TYPE": 1, "HEAD_TILES": 1},
    {"HEAD_DIM": 128, "PAGE": 64, "KV_TYPE": 0, "Q_TYPE": 0, "HEAD_TILES": 1},
    {"HEAD_DIM": 256, "PAGE": 64, "KV_TYPE": 0, "Q_TYPE": 0, "HEAD_TILES": 1},
    {"HEAD_DIM": 256, "PAGE": 16, "KV_TYPE": 0, "Q_TYPE": 0, "HEAD_TILES": 2},
    {"HEAD_DIM": 128, "PAGE": 16, "KV_TYPE": 3, "Q_TYPE": 0, "HEAD_TILES": 1},
    {"HEAD_DIM": 128, "PAGE": 16, "KV_TYPE": 3, "Q_TYPE": 1, "HEAD_TILES": 1},
    {"HEAD_DIM": 64, "PAGE": 16, "KV_TYPE": 3, "Q_TYPE": 0, "HEAD_TILES": 1},
    {"HEAD_DIM": 64, "PAGE": 16, "KV_TYPE": 0, "Q_TYPE": 0, "HEAD_TILES": 1},
]
SUMMARIZE = [
    *((r, 4, 0, 128, 16, 0) for r in (1, 2, 4, 8, 16)),
    *((r, 4, 1, 128, 16, 0) for r in (4, 6, 8, 16)),
    *((r, 16, 0, 128, 16, 0) for r in (1, 4, 8)),
    *((r, b, t, 128, 16, k) for (r, b, t), k in product(((4, 4, 0), (6, 4, 1)), (1, 3))),
    (6, 8, 0, 128, 16, 0),
    (4, 4, 0, 64, 16, 0),
    (8, 4, 0, 64, 16, 0),
    (6, 4, 1, 256, 16, 0),
    (8, 4, 0, 128, 32, 0),
    (6, 4, 1, 128, 32, 0),
    (8, 4, 0, 128, 64, 0),
    (16, 8, 0, 256, 64, 0),
    (16, 4, 1, 256, 64, 0),
]


def jobs():
    for constants in ATTEND:
        yield "attend", constants
    names = ("RANK", "BASIS_BITS", "ROTATED", "HEAD_DIM", "PAGE", "KEY_TYPE")
    for values in SUMMARIZE:
        yield "summarize", dict(zip(names, values, strict=True))
    for key in (0, 3):
        yield "envelope", {"HEAD_DIM": 128, "PAGE": 16, "KEY_TYPE": key}


if __name__ == "__main__":
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: build.load(job[0], **job[1]), jobs()))
