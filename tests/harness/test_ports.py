"""Ports of a job: free, and nobody else's."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness import ports, procs


def test_no_two_reservations_overlap(tmp_path: Path) -> None:
    """Ports that are reserved but not bound yet are not given to another process either."""
    code = (
        "import sys, pathlib, time\nfrom harness import ports\n"
        "print(*(ports.reserve(4, pathlib.Path(sys.argv[1])).base for _ in range(40)), flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": procs.python_path("")}
    others = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) for _ in range(3)
    ]
    bases: list[int] = []
    for other in others:
        assert other.stdout
        bases += map(int, other.stdout.readline().split())
    mine = [ports.reserve(4, tmp_path) for _ in range(40)]
    bases += [one.base for one in mine]
    for other in others:
        other.communicate()
    taken = [port for base in bases for port in range(base, base + 4)]
    assert len(bases) == 160
    assert len(set(taken)) == len(taken)


def test_a_port_in_use_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program's listener, also one on all addresses, makes its whole block unusable."""
    monkeypatch.setattr(random.SystemRandom, "shuffle", lambda self, blocks: None)  # blocks in order
    (tmp_path / "a").mkdir()
    first = ports.reserve(2, tmp_path / "a")
    with socket.socket() as listener:
        listener.bind(("", first.base + 1))
        listener.listen()
        (tmp_path / "b").mkdir()  # as if by another user: none of our locks
        second = ports.reserve(2, tmp_path / "b")
    assert second.base > first.base


def test_more_ports_than_a_block_has_are_refused(tmp_path: Path) -> None:
    """Rather an error than ports that reach into another job's."""
    with pytest.raises(ValueError, match="65 ports"):
        ports.reserve(65, tmp_path)


def test_no_free_port_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When every block is taken the message names the range."""
    monkeypatch.setattr(ports, "_LAST", ports._FIRST + 64)
    ports_kept = ports.reserve(1, tmp_path)
    with pytest.raises(OSError, match="20000 to 20064"):
        ports.reserve(1, tmp_path)
    assert ports_kept.count == 1
