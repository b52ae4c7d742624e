"""What the tests of jobs share: run the dummy rank, and look for processes that a job left."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.hosts import LocalHost
from harness.launch import JobSpec, Verdict, run_job

RANKS = Path(__file__).parent / "ranks"
DUMMY = str(RANKS / "dummy.py")
LEFT_SECONDS = 10.0  # what the project promises


def backends(*fast: str, of: Iterable[str] = ("none", "mpi", "ring")) -> pytest.MarkDecorator:
    """Try a test with each backend; those not named `fast` only where the slow tests run."""
    return pytest.mark.parametrize(
        "backend", [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in of]
    )


def ranks_of(backend: str) -> int:
    """One rank where there is no backend, two where there is."""
    return 1 if backend == "none" else 2


def spec(backend: str, ranks: int, work: Mapping[str, Any] | None = None, **changes: Any) -> JobSpec:
    """A job of dummy ranks, with limits that a passing test never reaches."""
    fields: dict[str, Any] = {
        "ranks": ranks,
        "backend": backend,
        "argv": (DUMMY,),
        "env": {},
        "deadline_seconds": 60.0,
        "stall_seconds": 50.0,
        "work": dict(work or {}),
    }
    return JobSpec(**{**fields, **changes})


class Job:
    """A job that runs in a thread of this process, so that the test can do something to it meanwhile."""

    def __init__(self, job: JobSpec, into: Path, host: LocalHost | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.verdict: Verdict | None = None
        self.into = into
        self._ready = threading.Event()
        self._ranks = job.ranks

        def run() -> None:
            self.verdict = run_job(host or LocalHost(), job, into, self._on_event)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def _on_event(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if len(self.named("ready")) == self._ranks:
            self._ready.set()

    def named(self, name: str) -> list[dict[str, Any]]:
        """The events of one kind, in rank order."""
        return sorted((e for e in self.events if e.get("event") == name), key=lambda e: e["rank"])

    def ready(self) -> list[dict[str, Any]]:
        """Wait until every rank has reported; their reports."""
        assert self._ready.wait(40), f"only {self.events} came"
        return self.named("ready")

    def end(self) -> Verdict:
        """Wait for the verdict, and assert that no process is left then."""
        self._thread.join(60)
        assert self.verdict is not None, "no verdict"
        assert_nothing_left(self.verdict.nonce, [e["pid"] for e in self.events if "pid" in e], within=1.0)
        return self.verdict


def run(job: JobSpec, into: Path) -> tuple[Verdict, list[dict[str, Any]]]:
    """Run a job to its end; the verdict and the events. Asserts that no process is left."""
    running = Job(job, into)
    return running.end(), running.events


def alive(pid: int) -> bool:
    """Whether a process has this pid and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def with_nonce(nonce: str) -> list[int]:
    """The living processes that have a job's nonce in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("SHARDBENCH_NONCE") == nonce and alive(process.pid):
                found.append(process.pid)
    return found


def assert_nothing_left(nonce: str, pids: Iterable[int], within: float = LEFT_SECONDS) -> None:
    """Assert that no process of the job lives: none with its nonce, and none of those whose pid is known."""
    known = list(pids)

    def left() -> list[int]:
        return sorted({*with_nonce(nonce), *filter(alive, known)})

    assert wait_for(lambda: not left(), within), f"left: {[psutil.Process(p).cmdline() for p in left()]}"


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition comes true within so many seconds."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that the test started."""
    assert pid > 1
    os.kill(pid, number)
