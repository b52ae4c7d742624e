"""`kill -9` of every process of a run in turn: nothing is left within ten seconds, and --resume does exactly the rest."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness import protocol
from tests.harness.jobs import LEFT_SECONDS, kill, wait_for, with_nonce
from tests.harness.shell import Done, Running, lines, shardbench, workplace

CASES = ["tensor 1", "rude:waits 2", "tensor 2", "upstream 2"]


class Run:
    """A run of four cases, stopped in time while its second job is at work: rank 0 and 1 wait in `rude:waits`."""

    def __init__(self, folder: Path) -> None:
        self.folder = workplace(folder)
        self.running = Running(
            *("run", "llama.json", "--strategy", "tensor,rude:waits,upstream", "--ranks", "1,2"),
            *("--steps", "8", "--context", "8", "--json"),
            cwd=self.folder,
        )
        ended = self.running.process.poll
        wait_for(lambda: len(self.waiting()) == 2 or ended() is not None, 60)
        assert ended() is None, self.running.errors.read_text()
        rank = self.waiting()[0]
        environment = rank.environ()
        self.jobdir = Path(environment[protocol.ENV_JOBDIR])
        self.nonce = environment[protocol.ENV_NONCE]
        (self.run,) = (self.folder / "results" / "runs").iterdir()
        self.before = (self.run / "records.jsonl").read_bytes()

    def waiting(self) -> list[psutil.Process]:
        """The two ranks, once both have said that they load `rude:waits`."""
        ranks = self.running.named("harness.worker")
        if len(ranks) != 2:
            return []
        try:
            jobdir = Path(ranks[0].environ()[protocol.ENV_JOBDIR])
        except (psutil.Error, KeyError):
            return []
        events = [path.read_text() for path in jobdir.glob("rank-*/events.jsonl")]
        if len(events) != 2 or not all('["rude:waits"]' in text for text in events):
            return []
        return ranks

    def pid(self, name: str) -> int:
        """The pid that a file of the job records."""
        record = protocol.read_record(self.jobdir / name)
        assert record is not None
        return int(record["pid"])

    def supervisor(self) -> int:
        """Of rank 1."""
        record = protocol.read_record(self.jobdir / "rank-1" / protocol.PID)
        assert record is not None
        return int(record["supervisor"]["pid"])

    def assert_nothing_left(self) -> None:
        """No process of the job: none with its nonce, its folder, or the environment of the command."""

        def left() -> list[int]:
            marked = [p.pid for p in self.running.descendants() if p.pid not in self.fresh()]
            return sorted({*marked, *with_nonce(self.nonce)})

        assert wait_for(lambda: not left(), LEFT_SECONDS), [psutil.Process(pid).cmdline() for pid in left()]

    def fresh(self) -> set[int]:
        """Processes of later jobs, which a controller that lives has every right to start."""
        found = set()
        for process in self.running.descendants():
            try:
                environment = process.environ()
            except (psutil.Error, OSError):
                continue
            if environment.get(protocol.ENV_NONCE, self.nonce) != self.nonce:
                found.add(process.pid)
        return found

    def go(self) -> None:
        """Let `rude:waits` go on, from now on."""
        (self.folder / "go").touch()

    def resume(self) -> Done:
        """Continue, and check that what was there stays as it was."""
        done = shardbench("run", "--resume", self.run.name, "--json", cwd=self.folder)
        assert (self.run / "records.jsonl").read_bytes().startswith(self.before)
        return done

    def records(self) -> list[dict[str, Any]]:
        """On the disk; every line whole."""
        return lines(self.run / "records.jsonl")


def name(record: dict[str, Any]) -> str:
    """Strategy and world size."""
    return f"{record['strategy']} {record['ranks']}"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run that waits; whatever a test leaves is ended."""
    made = Run(tmp_path / "here")
    try:
        yield made
    finally:
        made.running.stop()


def test_killing_the_controller(run: Run) -> None:
    """Nothing is left; the case that had ended is kept, and --resume does the other three."""
    assert [name(record) for record in run.records()] == CASES[:1]
    kill(run.running.process.pid)
    run.running.process.wait()
    run.assert_nothing_left()
    assert run.records() == [json.loads(line) for line in run.before.splitlines()]
    run.go()
    done = run.resume()
    assert done.status == 0, done.err
    assert sorted(map(name, run.records())) == sorted(CASES)
    assert {record["outcome"] for record in run.records()} == {"ok"}


@pytest.mark.parametrize(
    "victim",
    [
        "rank",
        pytest.param("launcher", marks=pytest.mark.slow),
        pytest.param("mpirun", marks=pytest.mark.slow),
        pytest.param("supervisor", marks=pytest.mark.slow),
        pytest.param("agent", marks=pytest.mark.slow),
    ],
)
def test_killing_a_part_of_the_job(run: Run, victim: str) -> None:
    """The controller outlives it: that case has crashed, nothing of the job is left, and the rest is run."""
    pids = {
        "rank": lambda: run.pid("rank-1/pid.json"),
        "launcher": lambda: run.pid("launcher.json"),
        "mpirun": lambda: psutil.Process(run.supervisor()).ppid(),
        "supervisor": run.supervisor,
        "agent": lambda: run.pid("agent.json"),
    }
    kill(pids[victim]())
    run.assert_nothing_left()
    run.go()
    done = run.running.end()
    assert done.status == 1, done.err
    outcomes = {name(record): record["outcome"] for record in run.records()}
    assert outcomes == {**dict.fromkeys(CASES, "ok"), "rude:waits 2": "crashed"}
    assert len(run.records()) == len(CASES)
    again = run.resume()
    assert len(run.records()) == len(CASES)
    assert again.status == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_interrupting_the_command(run: Run, number: int) -> None:
    """Ctrl-C or SIGTERM: nothing is left when it ends, and it says in one line how to go on."""
    run.running.process.send_signal(number)
    done = run.running.end(20)
    assert run.running.descendants() == []
    assert done.status == 130
    said = done.err.splitlines()[-1]
    assert f"--resume {run.run.name}" in said
    assert "Traceback" not in done.err
    assert done.out == ""
    run.go()
    assert run.resume().status == 0


@pytest.mark.slow
def test_a_run_has_one_writer(run: Run) -> None:
    """To resume a run that still goes on is refused in one line, and disturbs nothing."""
    done = shardbench("run", "--resume", run.run.name, cwd=run.folder)
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert run.run.name in done.err
    assert (run.run / "records.jsonl").read_bytes() == run.before
    run.go()
    assert run.running.end().status == 0
