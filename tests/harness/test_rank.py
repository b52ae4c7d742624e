"""The helper of a rank's program, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import procs, protocol
from harness.rank import RankContext
from tests.harness.test_protocol import JOB


@pytest.fixture
def jobdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job directory, and the environment of its rank 1."""
    protocol.write_atomic(tmp_path / "job.json", protocol.Job(**JOB).to_json())
    (tmp_path / "rank-1").mkdir()
    env = {"RANK": "1", "RANKS": "2", "NONCE": JOB["nonce"], "JOBDIR": str(tmp_path), "BACKEND": "mpi"}
    for name, value in {**env, "SUPERVISOR": str(os.getpid())}.items():
        monkeypatch.setenv(f"SHARDBENCH_{name}", value)
    monkeypatch.setenv("PYTHONPATH", procs.python_path(""))
    return tmp_path


def test_a_rank_knows_itself_and_its_work(jobdir: Path) -> None:
    """Number, size, backend and work come from the supervisor and `job.json`."""
    rank = RankContext.here()
    assert (rank.rank, rank.ranks, rank.backend, rank.work) == (1, 2, "mpi", {"n": 1})
    assert rank.folder == jobdir / "rank-1"
    rank.emit({"event": "x", "text": "ü\n" * 50_000})
    rank.emit({"event": "y"})
    lines = (jobdir / "rank-1" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["x", "y"]


def test_started_by_hand_or_for_another_job_it_refuses(jobdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without its supervisor, or with another job's directory, computes nothing."""
    monkeypatch.setenv("SHARDBENCH_NONCE", "f" * 32)
    with pytest.raises(ValueError, match="another job"):
        RankContext.here()
    monkeypatch.delenv("SHARDBENCH_RANK")
    with pytest.raises(ValueError, match="SHARDBENCH_RANK is not set"):
        RankContext.here()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("return 0", 0, ""),
        ("return 5", 5, ""),
        ("return 256", 1, ""),
        ("raise KeyError('layers')", 1, "KeyError: 'layers'"),
        ("raise SystemExit('no such strategy')", 1, "no such strategy"),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        (
            "atexit.register(time.sleep, 600); return 4",
            4,
            "",
        ),  # as MPI's clean-up waits for peers that never come
    ],
)
def test_run_ends_the_process_with_its_status(body: str, status: int, said: str, jobdir: Path) -> None:
    """A failed rank ends at once and never at 0; its error is the last line of its log."""
    code = f"import atexit, time\nfrom harness.rank import run\ndef main(rank):\n    {body}\nrun(main)\n"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False, cwd=jobdir
    )
    assert result.returncode == status
    assert result.stderr.strip().splitlines()[-1:] == ([said] if said else [])


def test_a_rank_ends_with_its_supervisor_without_the_kernels_help(jobdir: Path) -> None:
    """The watching thread alone ends a rank whose supervisor was killed (as on macOS)."""
    rank = "import time\nfrom harness.rank import run\ndef main(rank):\n    print('up', flush=True)\n    time.sleep(600)\nrun(main)"
    parent = (
        "import os, subprocess, sys\nos.environ['SHARDBENCH_SUPERVISOR'] = str(os.getpid())\n"
        f"subprocess.Popen([sys.executable, '-c', {rank!r}]).wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout
        assert supervisor.stdout.readline() == b"up\n"
        supervisor.kill()
        assert supervisor.stdout.read() == b""  # the rank held the other end: it is gone
