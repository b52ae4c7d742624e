"""Synthetic records, environments and repositories for the tests of the result files: no number here was measured."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
from pathlib import Path
from typing import Any

FIXTURE = Path(__file__).parent / "synthetic_records.jsonl"


def records() -> list[dict[str, Any]]:
    """Return the records of the synthetic run: two models, every outcome."""
    return copy.deepcopy(_fixture())


@functools.cache
def _fixture() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FIXTURE.read_text().splitlines()]


def record(**changes: Any) -> dict[str, Any]:
    """Return one synthetic record of outcome ok, with `changes`."""
    return {**copy.deepcopy(_fixture()[0]), **changes}


def environment(
    commit: str | None = None, commit_time: int = 1_760_000_000, **changes: Any
) -> dict[str, Any]:
    """Return a synthetic environment record, of `commit` when one is given."""
    git = {"commit": commit, "commit_time": commit_time, "branch": "main", "dirty": False}
    return {
        "schema": 1,
        "collected": "2025-11-30T10:00:00+00:00",
        "machine": {
            "name": "studio-1",
            "os": "macOS 26.3",
            "arch": "arm64",
            "chip": "Apple M3 Ultra",
            "cores": 32,
            "memory_bytes": 512 * 2**30,
        },
        "state": {"load": [1.2, 1.0, 0.9], "memory_available_bytes": 400 * 2**30, "power": {}, "thermal": {}},
        "git": git
        if commit
        else {"commit": None, "note": "the code that ran is not a git clone of the project"},
        "versions": {"python": "3.11.9", "mlx": "0.32.4", "mlx-lm": "0.32.2", "mlx-vlm": "0.7.10"},
        "blas": {"name": "Accelerate"},
        "threads": {},
        "mlx_variables": {"MLX_METAL_FAST_SYNCH": "1"},
        "ranks": [],
        **changes,
    }


def git(folder: Path, *arguments: str) -> str:
    """Run git in `folder` as nobody in particular and return its output."""
    identity = [
        "-c",
        "user.name=tests",
        "-c",
        "user.email=tests@example.invalid",
        "-c",
        "commit.gpgsign=false",
    ]
    argv = ["git", *identity, *arguments]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def repository(folder: Path, commits: int = 1) -> list[str]:
    """Make a git repository on branch main in `folder` and return the hashes of its commits."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    hashes = []
    for number in range(commits):
        (folder / "code.txt").write_text(f"version {number}\n")
        git(folder, "add", "code.txt")
        git(folder, "commit", "-q", "-m", f"commit {number}")
        hashes.append(git(folder, "rev-parse", "HEAD"))
    return hashes
