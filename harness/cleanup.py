"""End a job in order, so that nothing of it is left, and put together its verdict."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from harness import launcher, procs, protocol
from harness.judge import Ending

RECORD_SECONDS = (
    4.0  # for supervisors to end their rank and record it: their own grace, and some for a busy machine
)
LEAVE_SECONDS = 2.0  # for a launcher to leave by itself when its ranks have ended


def end_job(
    job: protocol.Job, jobdir: Path, started: launcher.Launcher | None, *, show_stacks: bool
) -> list[int]:
    """Ask the supervisors to end, then the launcher, then end whatever has the nonce in its environment.

    Args:
        started: the launcher if this process started it; an earlier agent's is found by its record.
        show_stacks: have the ranks write their Python stacks to their logs as they end.

    Returns:
        The pids that could not be ended: empty unless the kernel holds them.
    """
    supervisors = _supervisors(job, jobdir)
    for supervisor in supervisors:
        supervisor.send(signal.SIGUSR1 if show_stacks else signal.SIGTERM)
    until = time.monotonic() + RECORD_SECONDS
    while time.monotonic() < until and any(supervisor.alive() for supervisor in supervisors):
        time.sleep(0.02)
    record = protocol.read_record(jobdir / protocol.LAUNCHER)
    identity = started.identity if started else procs.ProcessId.read(record)
    if started:
        started.measure()
        with contextlib.suppress(OSError):
            started.process.send_signal(signal.SIGCONT)
        if all_recorded(job, jobdir):
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.process.wait(LEAVE_SECONDS)

    recorded = [*supervisors, *_ranks(job, jobdir), *([identity] if identity else [])]

    def left() -> list[psutil.Process]:
        # Recorded ones too: a process may have replaced its environment.
        by_pid = {process.pid: process for process in procs.of_job(job.nonce)}
        by_pid |= {process.pid: process for one in recorded if (process := one.process()) is not None}
        if started:
            started.process.poll()
        return list(by_pid.values())

    segments = procs.shared_memory(process.pid for process in left())
    survivors = procs.end_all(left)
    for segment in segments:
        with contextlib.suppress(OSError):
            segment.unlink()
    scratch = started.scratch if started else Path(str((record or {}).get("scratch", jobdir / "tmp")))
    if scratch.name == "tmp" or scratch.name.startswith("shardbench-"):
        shutil.rmtree(scratch, ignore_errors=True)
    return survivors


def all_recorded(job: protocol.Job, jobdir: Path) -> bool:
    """Whether every rank has its exit record."""
    return all(protocol.read_record(protocol.rank_dir(jobdir, r) / protocol.EXIT) for r in range(job.ranks))


def _supervisors(job: protocol.Job, jobdir: Path) -> list[procs.ProcessId]:
    records = (
        protocol.read_record(protocol.rank_dir(jobdir, rank) / protocol.PID) for rank in range(job.ranks)
    )
    return [one for record in records if record and (one := procs.ProcessId.read(record.get("supervisor")))]


def _ranks(job: protocol.Job, jobdir: Path) -> list[procs.ProcessId]:
    records = (
        protocol.read_record(protocol.rank_dir(jobdir, rank) / protocol.PID) for rank in range(job.ranks)
    )
    return [one for record in records if (one := procs.ProcessId.read(record))]


def verdict(
    job: protocol.Job, jobdir: Path, ending: Ending, started: launcher.Launcher | None, survivors: list[int]
) -> dict[str, Any]:
    """What `verdict.json` says. Without a launcher (one rank, or none started) its fields are null."""
    launched = started if started and job.ranks > 1 else None
    records = [
        protocol.read_record(protocol.rank_dir(jobdir, rank) / protocol.EXIT) for rank in range(job.ranks)
    ]
    left = f"; not ended could be: pid {', '.join(map(str, survivors))}" if survivors else ""
    return {
        "nonce": job.nonce,
        "outcome": ending.outcome,
        "reason": ending.reason + left,
        "ranks": [record for record in records if record],
        "launcher": {
            "pid": launched.process.pid if launched else None,
            "returncode": launched.process.poll() if launched else None,  # kept for the log; it means nothing
            "cpu_seconds": launched.cpu_seconds if launched else None,
            "stopped": bool(launched and launched.stopped),
        },
        "survivors": survivors,
    }
