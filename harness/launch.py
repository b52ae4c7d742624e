"""Run one job on a host, from its request to its verdict; the same for this machine and for a remote one.

verdict = run_job(LocalHost(), JobSpec(ranks=2, backend="mpi", argv=("-m", "harness.worker"), env={},
                  deadline_seconds=600, stall_seconds=60, work={...}), into=Path("logs"), on_event=print)
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any

from harness import protocol
from harness.errors import Unreachable, UsageError
from harness.hosts import Agent, Host

POLL_SECONDS = 1.0
OVERTIME_SECONDS = 45.0  # past a job's deadline, for its agent to end it and say so
CLEAN_UP_SECONDS = 15.0  # for an agent whose lifeline is cut

OnEvent = Callable[[dict[str, Any]], None]


class StopJob(Exception):
    """Raised by `on_event` to end the job now; what is given here becomes the verdict's outcome and reason."""

    def __init__(self, reason: str, outcome: str = "crashed") -> None:
        protocol.check(outcome in protocol.OUTCOMES, f"outcome {outcome!r}: one of {protocol.OUTCOMES}")
        super().__init__(reason)
        self.reason, self.outcome = reason, outcome


@dataclass(frozen=True)
class JobSpec:
    """What to run.

    Raises:
        UsageError: a field is out of its range, or a file is missing.
    """

    ranks: int
    backend: str  # "mpi", "ring", or "none" (one rank); one rank never goes through the launcher
    argv: tuple[str, ...]  # a rank's arguments to python; the job directory is appended
    env: Mapping[str, str]  # what a rank gets on top of the host's environment
    deadline_seconds: float  # for the whole job
    stall_seconds: float  # a living rank that emits no event for so long is hung
    work: Mapping[str, Any]  # for the rank; JSON
    files: Mapping[str, Path] = field(default_factory=dict)  # copied into the job directory under these names

    def __post_init__(self) -> None:
        try:
            json.dumps(dict(self.work))
            self.job(nonce="0" * 32, python="/python")
            for name, source in self.files.items():
                protocol.check_file_name(name)
                protocol.check(Path(source).is_file(), f"file {source} of a job: there is no such file")
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from None

    def job(self, nonce: str, python: str) -> protocol.Job:
        """The request as the processes of the job read it."""
        return protocol.Job(
            nonce=nonce,
            ranks=self.ranks,
            backend=self.backend,
            python=python,
            argv=tuple(self.argv),
            deadline_seconds=self.deadline_seconds,
            stall_seconds=self.stall_seconds,
            env=dict(self.env),
            work=dict(self.work),
        )


@dataclass(frozen=True)
class Verdict:
    """How a job ended."""

    outcome: str  # "ok", "crashed", "hung", "unreachable", or what StopJob said
    reason: str  # one line
    nonce: str
    ranks: list[dict[str, Any]]  # the exit records there are, in rank order
    launcher: dict[str, Any]  # pid, returncode (meaningless), cpu_seconds, stopped; {} when nobody could say
    jobdir_copy: (
        Path  # local: rank-<r>/{log,events.jsonl,exit.json,...}, launcher.log, agent.log, verdict.json
    )
    survivors: list[int] = field(default_factory=list)  # pids on the host that could not be ended

    def __post_init__(self) -> None:
        protocol.check(
            self.outcome in protocol.OUTCOMES, f"outcome {self.outcome!r}: one of {protocol.OUTCOMES}"
        )


def run_job(host: Host, spec: JobSpec, into: Path, on_event: OnEvent) -> Verdict:
    """Run a job and bring back what it left.

    Events are a live view: `on_event` gets `{"rank": r, ...}` as they come, each at most once; the files in
    `rank-<r>/events.jsonl` are the evidence. What it raises ends the job and goes through, except StopJob, which ends it
    with a verdict. So does Ctrl-C, and SIGTERM as if it were Ctrl-C. When this returns or raises, no process of the job
    is left, except on a host that can't be reached any more: there the agent ends the job by itself.

    Args:
        into: a local folder, made if needed, for the logs and records.

    Raises:
        UsageError: the host's interpreter is unusable.
        KeyboardInterrupt: after SIGINT or SIGTERM.
    """
    nonce = secrets.token_hex(16)
    try:
        job = spec.job(nonce, host.python)
    except ValueError as error:
        raise UsageError(f"host {host.name}: {error}") from None
    into.mkdir(parents=True, exist_ok=True)
    with _sigterm_is_interrupt():
        try:
            return _run(host, job, spec.files, into, on_event)
        except Unreachable as error:
            reason = " ".join(str(error).split()) or f"host {host.name} can't be reached"
            return Verdict("unreachable", reason, nonce, [], {}, into)


def _run(host: Host, job: protocol.Job, files: Mapping[str, Path], into: Path, on_event: OnEvent) -> Verdict:
    jobdir = host.create_job_dir(job.nonce)
    running: list[Agent] = []
    try:
        for name, source in files.items():
            host.put(Path(source), str(PurePosixPath(jobdir) / name))
        host.write(str(PurePosixPath(jobdir) / protocol.JOB), job.to_json(), 0o600)
        running.append(host.start_agent(jobdir))
        status, override = _follow(host, job, jobdir, running[-1], on_event)
        host.collect(jobdir, into)
        record = _read_verdict(job, into)
        if record is None:
            # The agent was killed. Another one ends what it left; the supervisors are at it too.
            running.append(host.start_agent(jobdir))
            again = running[-1].wait(OVERTIME_SECONDS)
            host.collect(jobdir, into)
            record = _read_verdict(job, into)
            if record is None:
                said = protocol.last_line(into / protocol.AGENT_LOG)
                record = {
                    "outcome": "crashed",
                    "reason": f"the agent ended at status {status}, then {again}, without a verdict"
                    + (f": {said}" if said else ""),
                }
        outcome, reason = override or (record["outcome"], record["reason"])
        return Verdict(
            outcome,
            reason,
            job.nonce,
            record.get("ranks", []),
            record.get("launcher", {}),
            into,
            record.get("survivors", []),
        )
    finally:
        with contextlib.suppress(Unreachable):
            for agent in running:
                agent.close_stdin()
            for agent in running:
                if agent.wait(CLEAN_UP_SECONDS) is None:
                    agent.kill()
            host.remove(jobdir)


def _follow(
    host: Host, job: protocol.Job, jobdir: str, agent: Agent, on_event: OnEvent
) -> tuple[int | None, tuple[str, str] | None]:
    """Hand on events until the agent has ended; its status, and the outcome and reason that overrule its verdict."""
    override: tuple[str, str] | None = None
    limit = time.monotonic() + job.deadline_seconds + OVERTIME_SECONDS
    ended: int | None = None
    while True:
        for line in agent.lines(POLL_SECONDS if ended is None else 0.0):
            if time.monotonic() > limit:
                break  # one that talks without end is late as well
            event = _parse(line)
            if override is None and event is not None:
                try:
                    on_event(event)
                except StopJob as stop:
                    override = stop.outcome, stop.reason
                    host.write(str(PurePosixPath(jobdir) / protocol.STOP), b"", 0o600)
        if ended is not None:
            return ended, override
        ended = agent.wait(0.05)
        if ended is None and time.monotonic() > limit:
            agent.kill()
            ended = agent.wait(POLL_SECONDS)
            reason = (
                f"the agent did not end the job by its deadline of {job.deadline_seconds:g} s and was killed"
            )
            return ended, override or ("hung", reason)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None  # a shell profile on a remote host may print anything
    return event if isinstance(event, dict) and isinstance(event.get("rank"), int) else None


def _read_verdict(job: protocol.Job, into: Path) -> dict[str, Any] | None:
    record = protocol.read_record(into / protocol.VERDICT)
    return (
        record
        if record and record.get("nonce") == job.nonce and record.get("outcome") in protocol.OUTCOMES
        else None
    )


@contextlib.contextmanager
def _sigterm_is_interrupt() -> Iterator[None]:
    """SIGTERM as KeyboardInterrupt, so that the job is ended in order; only the main thread can have it so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
