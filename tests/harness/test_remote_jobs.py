"""Whole jobs over a real sshd: the same `run_job` as for this machine, the same evidence, and no process left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.deploy import own_packages
from harness.remote import SshHost
from harness.ssh import Timeouts
from tests.harness.jobs import RANKS, Job, assert_nothing_left, kill, spec, wait_for
from tests.lab.sshd import Sshd, sshd

__all__ = ["sshd"]  # a fixture

TIMEOUTS = Timeouts(heartbeat=1.0, silence=8.0)
ARGV = ("-m", "dummy")
SLEEP = {"sleep": 60}

# What `shardbench run --cluster` does, small enough to be killed: argv is the described host and a folder.
CONTROLLER = """
import json, sys
from pathlib import Path
from harness.cluster import load_cluster
from harness.launch import JobSpec, run_job
from harness.remote import SshHost
host = load_cluster(Path(sys.argv[1])).head_host
packages = {name: Path(path) for name, path in json.loads(sys.argv[2]).items()}
spec = JobSpec(ranks=2, backend="mpi", argv=("-m", "dummy"), env={}, deadline_seconds=60, stall_seconds=50,
               work={"sleep": 60})
run_job(SshHost(host, packages=packages), spec, Path(sys.argv[3]), lambda event: print(json.dumps(event), flush=True))
"""


@pytest.fixture(scope="module")
def packages() -> dict[str, Path]:
    """What a job brings along: our own packages, and the module that its ranks run."""
    return {**own_packages(), "dummy": RANKS / "dummy.py"}


@pytest.fixture
def host(sshd: Sshd, packages: dict[str, Path], tmp_path: Path) -> Iterator[Any]:
    """A connected host whose workdir has a space and quotes in its name."""
    described = sshd.host(workdir=str(tmp_path / "a work 'folder' \"x\""), env={"FROM_CLUSTER": "it's $HOME"})
    with SshHost(described, packages=packages, timeouts=TIMEOUTS) as connected:
        yield connected


def test_a_two_rank_job_runs_there_as_here(host: Any, tmp_path: Path) -> None:
    """Two ranks find each other through mlx.launch on the host, report as they go, and their records come back."""
    job = spec(
        "mpi", 2, {"collective": True, "env": ["FROM_CLUSTER", "FROM_JOB"]}, argv=ARGV, env={"FROM_JOB": "1"}
    )
    running = Job(job, tmp_path / "into", host)
    verdict = running.end()
    assert verdict.outcome == "ok", verdict.reason
    assert [event["sum"] for event in running.ready()] == [2.0, 2.0]
    assert all(event["env"] == {"FROM_CLUSTER": "it's $HOME", "FROM_JOB": "1"} for event in running.ready())
    assert [record["returncode"] for record in verdict.ranks] == [0, 0]
    for rank in (0, 1):
        folder = verdict.jobdir_copy / f"rank-{rank}"
        assert {"log", "events.jsonl", "exit.json"} <= {path.name for path in folder.iterdir()}
        assert json.loads((folder / "events.jsonl").read_text())["event"] == "ready"
    assert list(Path(host.files.root / "jobs").iterdir()) == []


def test_a_crash_there_is_a_crash_here(host: Any, tmp_path: Path) -> None:
    """The verdict names the rank and its last line, and the log that holds the rest is here."""
    running = Job(spec("none", 1, {"raise": "no such thing"}, argv=ARGV), tmp_path, host)
    verdict = running.end()
    assert verdict.outcome == "crashed"
    assert "no such thing" in verdict.reason
    assert "Traceback" in (tmp_path / "rank-0/log").read_text()


@pytest.mark.slow
def test_a_killed_agent_is_followed_by_another(host: Any, tmp_path: Path) -> None:
    """Without its agent a job there ends with a verdict and no process left, as here."""
    running = Job(spec("mpi", 2, SLEEP, argv=ARGV), tmp_path, host)
    record = json.loads((Path(running.ready()[0]["jobdir"]) / "agent.json").read_text())
    kill(record["pid"])
    verdict = running.end()
    assert verdict.outcome == "crashed"
    assert "was killed before it had judged" in verdict.reason


def test_a_cut_connection_ends_the_job_on_both_sides(host: Any, sshd: Sshd, tmp_path: Path) -> None:
    """Here the verdict is `unreachable` at once; there the agent loses its lifeline and no process is left. The next
    job finds the host back."""
    running = Job(spec("mpi", 2, SLEEP, argv=ARGV), tmp_path / "cut", host)
    pids = [event[key] for event in running.ready() for key in ("pid", "supervisor")]
    jobdir = Path(running.ready()[0]["jobdir"])
    nonce = json.loads((jobdir / "job.json").read_text())["nonce"]
    sshd.signal_sessions(9)
    assert wait_for(lambda: running.verdict is not None, 10)
    assert running.verdict is not None
    assert (running.verdict.outcome, running.verdict.ranks) == ("unreachable", [])
    assert running.verdict.reason.startswith("lab: ")
    assert_nothing_left(nonce, pids)
    verdict = Job(spec("none", 1, argv=ARGV), tmp_path / "next", host).end()
    assert verdict.outcome == "ok", verdict.reason


def test_a_killed_controller_leaves_nothing_there(
    sshd: Sshd, packages: dict[str, Path], tmp_path: Path
) -> None:
    """`kill -9` of the process that holds the connection ends the job on the host."""
    cluster = tmp_path / "cluster.toml"
    described = sshd.host()
    keys = ("ssh", "user", "port", "key", "known_hosts", "python")
    values = {key: getattr(described, key) for key in keys}
    lines = [f"{key} = {json.dumps(value if key == 'port' else str(value))}" for key, value in values.items()]
    cluster.write_text("\n".join(["[[hosts]]", *lines, f"workdir = {json.dumps(str(tmp_path / 'work'))}"]))
    named = json.dumps({name: str(path) for name, path in packages.items()})
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(cluster), named, str(tmp_path / "into")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(packages["harness"].parent)},
    )
    assert controller.stdout is not None
    with controller.stdout as stdout:
        events = [json.loads(stdout.readline()) for _ in range(2)]
        kill(controller.pid)
        controller.wait()
    nonce = json.loads((Path(events[0]["jobdir"]) / "job.json").read_text())["nonce"]
    assert_nothing_left(nonce, [event[key] for event in events for key in ("pid", "supervisor")])
