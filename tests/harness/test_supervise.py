"""Which rank a supervisor serves, and when it refuses to serve any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import launcher, procs, protocol, supervise
from tests.harness.test_protocol import JOB


def job(**changes: Any) -> protocol.Job:
    """A valid job with some fields changed."""
    return protocol.Job(**{**JOB, "python": sys.executable, "argv": ("-c", "print('ran')"), **changes})


@pytest.mark.parametrize(
    ("backend", "env", "rank"),
    [
        ("ring", {"MLX_RANK": "1"}, 1),
        ("mpi", {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1),
        ("mpi", {"MLX_RANK": "0", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1),
    ],
)
def test_the_launcher_of_the_jobs_backend_says_which_rank_it_is(
    backend: str, env: dict[str, str], rank: int
) -> None:
    """Only the backend's own variables count."""
    assert supervise.rank_number(job(backend=backend), env) == rank


@pytest.mark.parametrize(
    ("backend", "env"),
    [
        ("ring", {}),
        ("ring", {"MLX_RANK": ""}),
        ("ring", {"MLX_RANK": "2"}),
        ("ring", {"MLX_RANK": "-1"}),
        ("mpi", {"MLX_RANK": "1"}),
        ("mpi", {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}),
    ],
)
def test_a_rank_that_cannot_be_told_is_refused_not_guessed(backend: str, env: dict[str, str]) -> None:
    """N ranks that each believed to be alone would compute N times the same, at N times the speed."""
    with pytest.raises(ValueError, match="rank"):
        supervise.rank_number(job(backend=backend), env)


def start(jobdir: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run one supervisor to its end."""
    clean = {k: v for k, v in os.environ.items() if not protocol.LAUNCHER_VARIABLES.fullmatch(k)}
    return subprocess.run(
        [sys.executable, "-m", "harness.supervise", str(jobdir)],
        env={**clean, "PYTHONPATH": procs.python_path(""), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_the_second_of_two_that_claim_one_rank_refuses(tmp_path: Path) -> None:
    """Rank 0 is served once; the other says so where the agent looks, and does not run the program."""
    protocol.write_atomic(tmp_path / "job.json", job(backend="ring").to_json())
    lock = procs.take_lock(tmp_path / "alive.lock")
    assert start(tmp_path, MLX_RANK="0").returncode == 0
    first = protocol.read_record(tmp_path / "rank-0" / "exit.json")
    second = start(tmp_path, MLX_RANK="0")
    assert lock is not None
    os.close(lock)
    (refusal,) = tmp_path.glob("refused-*.json")
    assert first is not None
    assert first["returncode"] == 0
    assert second.returncode == 1
    assert "two processes claim to be one rank" in str(protocol.read_record(refusal))
    assert (tmp_path / "rank-0" / "log").read_text() == "ran\n"


def test_without_a_living_agent_no_rank_is_started(tmp_path: Path) -> None:
    """A supervisor that mpirun starts after the agent was killed starts nothing."""
    protocol.write_atomic(tmp_path / "job.json", job(backend="ring").to_json())
    (tmp_path / "alive.lock").touch()
    result = start(tmp_path, MLX_RANK="0")
    assert result.returncode == 1
    assert result.stderr == "supervisor: the agent is gone\n"
    assert not (tmp_path / "rank-0").exists()


def test_an_interpreter_that_does_not_exist_is_on_record(tmp_path: Path) -> None:
    """That the program could not be started is an exit record like any other."""
    text = job(backend="ring", python="/no/such/python").to_json()
    protocol.write_atomic(tmp_path / "job.json", text)
    lock = procs.take_lock(tmp_path / "alive.lock")
    start(tmp_path, MLX_RANK="1")
    record = protocol.read_record(tmp_path / "rank-1" / "exit.json")
    assert lock is not None
    os.close(lock)
    assert record is not None
    assert record["returncode"] is None
    assert record["reason"].startswith("could not be started: [Errno 2]")


def test_one_rank_needs_no_launcher_and_many_get_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's argv: the interpreter in the command, the job's own port, and idle ranks that yield when crowded."""
    alone = launcher.command(job(ranks=1), tmp_path, None)
    assert alone == [sys.executable, "-m", "harness.supervise", str(tmp_path)]
    ring = launcher.command(job(backend="ring"), tmp_path, 23456)
    assert ring[-4:] == alone
    assert ring[ring.index("--starting-port") + 1] == "23456"
    for cores, yields in ((2, False), (1, True)):
        monkeypatch.setattr(launcher, "usable_cores", lambda cores=cores: cores)
        mpi = launcher.command(job(backend="mpi"), tmp_path, None)
        assert any("mpi_yield_when_idle 1" in word for word in mpi) is yields
        assert "--mpi-arg=--bind-to none" in mpi


def test_without_mpirun_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx.launch itself fails with a traceback about `which`."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="install openmpi"):
        launcher.start(job(python=str(tmp_path / "bin" / "python")), tmp_path, tmp_path)
