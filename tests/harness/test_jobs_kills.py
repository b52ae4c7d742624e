"""`kill -9` of every process of a job in turn: the verdict says what happened, and no process is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness import launch, procs, protocol
from tests.harness.jobs import (
    RANKS,
    Job,
    alive,
    assert_nothing_left,
    backends,
    kill,
    ranks_of,
    spec,
    wait_for,
)

SLEEP = {"sleep": 60}
TWO = ("mpi", "ring")


def pid_in(job: Job, name: str) -> int:
    """The pid that a file of the running job's directory records."""
    record = protocol.read_record(Path(job.ready()[0]["jobdir"]) / name)
    assert record is not None
    return int(record["pid"])


@backends("mpi", "ring", of=TWO)
def test_killing_the_launcher_ends_the_job(backend: str, tmp_path: Path) -> None:
    """mlx.launch itself would leave its ranks running; here they end, and the verdict names the launcher."""
    job = Job(spec(backend, 2, SLEEP), tmp_path)
    kill(pid_in(job, "launcher.json"))
    verdict = job.end()
    assert verdict.outcome == "crashed"
    assert verdict.reason.startswith("the launcher ended before rank 0 did")
    assert len(verdict.ranks) == 2


@pytest.mark.slow
def test_killing_mpirun_ends_the_job(tmp_path: Path) -> None:
    """mpirun is the process between mlx.launch and the supervisors: without it the job is over as well."""
    job = Job(spec("mpi", 2, {"collective": "forever"}), tmp_path)
    mpirun = psutil.Process(job.ready()[0]["supervisor"]).ppid()
    assert mpirun != pid_in(job, "launcher.json")
    kill(mpirun)
    assert job.end().outcome == "crashed"


@backends("mpi", "ring", of=TWO)
def test_killing_a_rank_amid_collectives_ends_the_job(backend: str, tmp_path: Path) -> None:
    """The killed rank is named, not the peer that complains of its loss."""
    job = Job(spec(backend, 2, {"collective": "forever"}), tmp_path)
    kill(job.ready()[1]["pid"])
    verdict = job.end()
    assert verdict.outcome == "crashed"
    assert verdict.reason.startswith("rank 1 was killed by SIGKILL")


@backends("mpi")
def test_killing_a_supervisor_ends_the_job(backend: str, tmp_path: Path) -> None:
    """Nobody records how that rank ended; the verdict says so, and the rank is gone."""
    job = Job(spec(backend, ranks_of(backend), SLEEP), tmp_path)
    kill(job.ready()[-1]["supervisor"])
    verdict = job.end()
    assert verdict.outcome == "crashed"
    assert (
        verdict.reason
        == f"the supervisor of rank {ranks_of(backend) - 1} was killed before the rank had ended"
    )


@backends("ring")
def test_killing_the_agent_ends_the_job_and_there_is_a_verdict(backend: str, tmp_path: Path) -> None:
    """The supervisors and a second agent end what the first left, a stopped ring launcher included."""
    job = Job(spec(backend, ranks_of(backend), SLEEP), tmp_path)
    job.ready()
    agent = pid_in(job, "agent.json")
    if backend == "ring":
        launcher = psutil.Process(pid_in(job, "launcher.json"))
        assert wait_for(lambda: launcher.status() == psutil.STATUS_STOPPED, 10)
    kill(agent)
    verdict = job.end()
    assert verdict.outcome == "crashed"
    assert verdict.reason.startswith(f"the agent (pid {agent}) was killed")
    assert len(verdict.ranks) == ranks_of(backend)
    assert verdict.survivors == []


@pytest.mark.slow
def test_a_stopped_agent_is_killed_and_the_job_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller does not wait for an agent that keeps neither its deadline nor its word."""
    monkeypatch.setattr(launch, "OVERTIME_SECONDS", 8.0)
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.2)
    job = Job(spec("none", 1, {"sleep": 60}, deadline_seconds=1.0), tmp_path)
    job.ready()
    monkeypatch.setattr(launch, "OVERTIME_SECONDS", 20.0)  # the second agent's time is not what is tested
    kill(pid_in(job, "agent.json"), signal.SIGSTOP)
    verdict = job.end()
    assert verdict.outcome == "hung"
    assert "agent did not end the job by its deadline" in verdict.reason


def start_controller(
    backend: str, tmp_path: Path, work: dict[str, Any]
) -> tuple[subprocess.Popen[str], list[dict[str, Any]], str]:
    """A controller in a process of its own, its ranks' reports, and the job's nonce."""
    ranks = ranks_of(backend)
    controller = subprocess.Popen(
        [
            sys.executable,
            str(RANKS / "controller.py"),
            backend,
            str(ranks),
            str(tmp_path / "out"),
            json.dumps(work),
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": procs.python_path("")},
    )
    assert controller.stdout
    ready: list[dict[str, Any]] = []
    while len(ready) < ranks:
        event = json.loads(controller.stdout.readline())
        ready += [event] if event["event"] == "ready" else []
    return controller, ready, protocol.Job.load(Path(ready[0]["jobdir"])).nonce


@backends("mpi")
def test_killing_the_controller_leaves_no_process(backend: str, tmp_path: Path) -> None:
    """The agent notices the end of its lifeline and ends the job; even a rank that ignores SIGTERM is gone."""
    controller, ready, nonce = start_controller(
        backend, tmp_path, {"sleep": 60, "ignore_term": backend == "none"}
    )
    controller.kill()
    controller.wait()
    assert_nothing_left(nonce, [pid for event in ready for pid in (event["pid"], event["supervisor"])])
    record = protocol.read_record(Path(ready[0]["jobdir"]) / "verdict.json")
    assert record is not None
    assert record["reason"] == "stopped because the controller is gone"
    shutil.rmtree(ready[0]["jobdir"])  # kept for a day, for whoever wants to know


@backends("ring")
def test_killing_controller_and_agent_leaves_no_process(backend: str, tmp_path: Path) -> None:
    """With nobody left to tell them, the supervisors notice that the agent's lock is free, and end the rest."""
    controller, ready, nonce = start_controller(backend, tmp_path, {"sleep": 60})
    jobdir = Path(ready[0]["jobdir"])
    agent = protocol.read_record(jobdir / "agent.json")
    launcher = protocol.read_record(jobdir / "launcher.json")
    assert agent is not None
    assert launcher is not None
    controller.send_signal(signal.SIGSTOP)
    kill(agent["pid"])
    controller.kill()
    controller.wait()
    assert_nothing_left(
        nonce, [*(e["pid"] for e in ready), *(e["supervisor"] for e in ready), launcher["pid"]]
    )
    shutil.rmtree(jobdir)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_interrupting_the_controller_cleans_up_and_raises(number: int, tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM are KeyboardInterrupt for the caller, when processes and directory are gone already."""
    controller, ready, nonce = start_controller("none", tmp_path, {"sleep": 60})
    controller.send_signal(number)
    assert controller.stdout
    assert json.loads(controller.stdout.readline()) == {"event": "interrupted"}
    assert_nothing_left(nonce, [event["pid"] for event in ready], within=1.0)
    assert not Path(ready[0]["jobdir"]).exists()
    controller.wait()


@pytest.mark.slow
def test_a_controller_that_reads_nothing_does_not_hold_up_the_agent(tmp_path: Path) -> None:
    """With its stdout full the agent still watches: a crash is judged and ended while the controller is stopped."""
    work = {"big_event": 3_000_000, "steps": 30, "status": 4}
    controller, ready, nonce = start_controller("none", tmp_path, work)
    controller.send_signal(signal.SIGSTOP)
    try:
        assert wait_for(lambda: not alive(ready[0]["pid"]), 20)
        assert_nothing_left(
            nonce, [ready[0]["supervisor"]], within=20
        )  # the agent included: it gives up its events
        record = protocol.read_record(Path(ready[0]["jobdir"]) / "verdict.json")
    finally:
        controller.kill()
        controller.wait()
    assert record is not None
    assert record["reason"].startswith("rank 0 exited with status 4")
    shutil.rmtree(ready[0]["jobdir"])
