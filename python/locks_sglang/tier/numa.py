"""Put memory on a NUMA node, and look where it lies."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from pathlib import Path

from .topology import ROOT, read_text

_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
_BITS = 1024
_NOT_PERMITTED = (errno.EPERM, errno.ENOSYS)
_MAP = re.compile(r"^([0-9a-f]+) \S+ (.*)$", re.M)


def prefer(address: int, nbytes: int, node: int) -> bool:
    """Ask for the pages of a mapping on one node; False where the system does not let us.

    Docker forbids it without ``SYS_NICE``.  Pages then lie where the thread runs that touches them
    first.  A preference and not a binding: where a node is full, a binding ends in the process being
    killed, while :func:`placed` tells afterwards what lies elsewhere.

    Raises:
        OSError: the system refuses for another reason.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_PREFERRED),
        mask,
        ctypes.c_ulong(_BITS),
        ctypes.c_uint(0),
    )
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_PERMITTED:
        return False
    raise OSError(code, f"mbind on NUMA node {node}: {os.strerror(code)}")


def placed(address: int, nbytes: int, root: Path = ROOT) -> dict[int, int] | None:
    """Bytes of a mapping, and of neighbours that are one with it to the system, on each node.

    None where the system does not say.
    """
    text = read_text(root / "proc/self/numa_maps")
    starts = [(int(match[1], 16), match[2]) for match in _MAP.finditer(text)]
    # It may begin in the middle of a line.
    first = max((start for start, _ in starts if start <= address), default=address)
    found: dict[int, int] = {}
    for start, facts in starts:
        if first <= start < address + nbytes:
            size = re.search(r"kernelpagesize_kB=(\d+)", facts)
            for node, pages in re.findall(r"\bN(\d+)=(\d+)", facts):
                there = int(pages) * 1024 * (int(size[1]) if size else 4)
                found[int(node)] = found.get(int(node), 0) + there
    return found or None
