"""Ports for one job on this machine that no other job gets: left alone, mlx.launch gives every job the same ones."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness import procs, protocol

# Below the ports that Linux (32768) and macOS (49152) hand out by themselves.
_FIRST, _LAST, _BLOCK = 20000, 32000, 64


@dataclass(frozen=True)
class Ports:
    """`count` consecutive ports from `base`, ours until this process ends."""

    base: int
    count: int
    _lock: int


def reserve(count: int, folder: Path | None = None, host: str = "127.0.0.1") -> Ports:
    """Find consecutive ports that can be bound on `host` and that no other job of this user holds.

    A port can't be kept bound for the ranks, which bind it themselves. So a locked file stands for each block of ports
    until this process ends: two jobs that probe at the same moment still get different ones.

    Raises:
        OSError: no such ports are left.
        ValueError: more ports than a block has.
    """
    protocol.check(1 <= count <= _BLOCK, f"{count} ports: from 1 to {_BLOCK} can be reserved")
    folder = folder or _shared_folder()
    blocks = list(range(_FIRST, _LAST, _BLOCK))
    random.SystemRandom().shuffle(blocks)
    for base in blocks:
        lock = procs.take_lock(folder / f"{base}.lock", patience=0)
        if lock is None:
            continue
        if all(_can_bind(host, port) for port in range(base, base + count)):
            return Ports(base, count, lock)
        os.close(lock)
    raise OSError(
        f"no {count} consecutive free ports from {_FIRST} to {_LAST} on {host}: end what holds them"
    )


def _can_bind(host: str, port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind((host, port))  # without SO_REUSEADDR: a port in TIME_WAIT is refused as well
        return True
    return False


def _shared_folder() -> Path:
    # Not TMPDIR where it can be helped: jobs started from shells with different ones must see the same locks.
    base = Path("/tmp")  # noqa: S108 - the folder below it is checked to be ours and private
    if not base.is_dir():
        base = Path(tempfile.gettempdir())
    protocol.private_folder(base / f"shardbench-{os.getuid()}")
    return protocol.private_folder(base / f"shardbench-{os.getuid()}" / "ports")
