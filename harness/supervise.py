"""`python -m harness.supervise JOBDIR`: starts one rank, watches over it, records how it ended.

One per rank, started by mlx.launch or by the agent. The record is written by the process that can't be mistaken about
it, the rank's parent. When the agent dies (its lock is free) the supervisor ends the rank and whatever else is left of
the job. Its own exit status is 0 whatever its rank did, since launchers react to it in ways of their own.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from harness import jit, procs, protocol
from harness.wakeup import Wakeup

TICK_SECONDS = 0.5
GRACE_SECONDS = 2.0  # from asking a rank to end to killing it
LAST_RESORT_SECONDS = 60.0  # past the deadline, should the agent live but not act


def rank_number(job: protocol.Job, env: Mapping[str, str]) -> int:
    """Which rank this is, from what the launcher left in the environment; ValueError when that makes no sense.

    A rank that can't tell must not guess 0: N ranks that each compute alone would look N times as fast.
    """
    if job.ranks == 1:
        return 0
    number, size = (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE") if job.backend == "mpi" else ("MLX_RANK", "")
    )
    value = env.get(number, "")
    protocol.check(value.isdecimal(), f"{number}={value!r}: the launcher did not say which rank this is")
    protocol.check(int(value) < job.ranks, f"{number}={value}: the job has {job.ranks} ranks")
    if size:
        protocol.check(
            env.get(size) == str(job.ranks), f"{size}={env.get(size)}: the job has {job.ranks} ranks"
        )
    return int(value)


def rank_environment(job: protocol.Job, jobdir: Path, rank: int, env: Mapping[str, str]) -> dict[str, str]:
    """What the launcher gave (MLX_*, OMPI_* included), then what the job says, then who the rank is."""
    merged = {
        **env,
        "PYTHONUNBUFFERED": "1",  # what a killed rank printed is in its log
        "PYTHONFAULTHANDLER": "1",  # and so is where it was when it crashed or hung
        **job.env,
    }
    return {
        **merged,
        "PYTHONPATH": procs.python_path(merged.get("PYTHONPATH", "")),
        protocol.ENV_RANK: str(rank),
        protocol.ENV_RANKS: str(job.ranks),
        protocol.ENV_NONCE: job.nonce,
        protocol.ENV_JOBDIR: str(jobdir),
        protocol.ENV_BACKEND: job.backend if job.ranks > 1 else "none",
        protocol.ENV_SUPERVISOR: str(os.getpid()),
    }


class Supervisor:
    """One rank from its start to its exit record."""

    def __init__(self, job: protocol.Job, jobdir: Path, rank: int) -> None:
        self.job, self.jobdir, self.rank = job, jobdir, rank
        self.folder = protocol.rank_dir(jobdir, rank)
        self.scratch = Path(os.environ.get("TMPDIR") or jobdir) / f"rank-{rank}-tmp"
        self.begun = time.time()
        self.child: subprocess.Popen[bytes] | None = None

    def run(self, signals: Wakeup) -> None:
        """Start the rank, wait for its end or a reason to end it, and write `exit.json`."""
        try:
            self._start()
        except (OSError, subprocess.SubprocessError) as error:
            self._record(None, f"could not be started: {error}", stopped=False)
            return
        reason = self._watch(signals)
        if reason is None:
            self._end_group(signal.SIGKILL)  # what the rank started and left
            if self._child.returncode == 0:
                jit.give_back(self.scratch)
            self._record(self._child.returncode, "ended by itself", stopped=False)
        else:
            segments = procs.shared_memory([self._child.pid])
            self._stop(signal.SIGABRT if signal.SIGUSR1 in signals.seen else signal.SIGTERM)
            for segment in segments:
                with contextlib.suppress(OSError):
                    segment.unlink()
            self._record(self._child.returncode, reason, stopped=True)

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        assert self.child is not None
        return self.child

    def _start(self) -> None:
        jit.lend(self.scratch)
        with (self.folder / protocol.LOG).open("ab") as log:
            self.child = subprocess.Popen(
                [self.job.python, *self.job.argv, str(self.jobdir)],
                cwd=self.folder,
                env={
                    **rank_environment(self.job, self.jobdir, self.rank, os.environ),
                    "TMPDIR": str(self.scratch),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,  # a file: no reader that could fall behind, no pipe that could fill
                stderr=log,
                start_new_session=True,
                preexec_fn=procs.die_with_parent(),  # noqa: PLW1509 - this process has one thread
            )
        mine = procs.ProcessId.of(os.getpid())
        rank = procs.ProcessId.of(self._child.pid) or procs.ProcessId(self._child.pid, self.begun)
        protocol.write_record(
            self.folder / protocol.PID,
            {
                "nonce": self.job.nonce,
                "rank": self.rank,
                **rank.to_json(),
                "supervisor": mine.to_json() if mine else None,
            },
        )

    def _watch(self, signals: Wakeup) -> str | None:
        """Sleep until the rank ended by itself (None) or there is a reason to end it."""
        limit = time.monotonic() + self.job.deadline_seconds + LAST_RESORT_SECONDS
        while self._child.poll() is None:
            if signals.asked_to_end() or signal.SIGUSR1 in signals.seen:
                return "stopped on request"
            if not procs.lock_is_held(self.jobdir / protocol.LOCK):
                return "stopped because the agent is gone"
            if time.monotonic() > limit:
                return "stopped long after the deadline"
            signals.wait(TICK_SECONDS)
        return None

    def _stop(self, first: signal.Signals) -> None:
        """SIGTERM (or SIGABRT, which writes the rank's Python stack to its log), then SIGKILL."""
        self._end_group(first)
        self._end_group(signal.SIGCONT)  # a stopped rank hears nothing else
        try:
            self._child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._end_group(signal.SIGKILL)
        self._child.wait()
        self._end_group(signal.SIGKILL)

    def _end_group(self, number: int) -> None:
        # The group has the rank's pid as its number. That is not used again while the group has members.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)

    def _record(self, returncode: int | None, reason: str, stopped: bool) -> None:
        ended = time.time()
        record: dict[str, Any] = {
            "nonce": self.job.nonce,
            "rank": self.rank,
            "pid": self.child.pid if self.child else None,
            "started": self.begun,
            "ended": ended,
            "seconds": ended - self.begun,
            "returncode": returncode,
            "signal": protocol.signal_name(-returncode) if returncode and returncode < 0 else None,
            "reason": reason,
            "stopped": stopped,  # True: it was made to end, so its status accuses nobody
        }
        with contextlib.suppress(FileNotFoundError):  # the directory was removed: nobody is left to read this
            protocol.write_record(self.folder / protocol.EXIT, record)


def end_orphans(jobdir: Path, nonce: str) -> None:
    """The agent is dead: end the launcher and all else of the job, unless a new agent takes over meanwhile."""

    def left() -> list[psutil.Process]:
        if procs.lock_is_held(jobdir / protocol.LOCK):
            return []
        found = []
        for process in procs.of_job(nonce):
            with contextlib.suppress(psutil.Error):
                if "harness.agent" not in process.cmdline():
                    found.append(process)
        return found

    if nonce:
        procs.end_all(left, grace=GRACE_SECONDS + 1.0)  # the other supervisors need time to record


def main(argv: list[str]) -> int:
    """Supervise one rank; 0 when its end is on record, 1 when it could not begin."""
    jobdir = Path(argv[1])
    os.umask(0o077)
    with contextlib.suppress(PermissionError):  # mpirun has made it the leader of a group already
        os.setsid()  # so that ending the launcher's group leaves the supervisor time to record
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a rank that is aborted leaves no core file
    signals = Wakeup(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)
    try:
        job = protocol.Job.load(jobdir)
        rank = rank_number(job, os.environ)
        protocol.check(procs.lock_is_held(jobdir / protocol.LOCK), "the agent is gone")
        protocol.rank_dir(jobdir, rank).mkdir(mode=0o700)  # fails for the second of two that claim one rank
    except (ValueError, OSError) as error:
        what = (
            f"two processes claim to be one rank: {error}"
            if isinstance(error, FileExistsError)
            else str(error)
        )
        with contextlib.suppress(OSError):
            protocol.write_record(
                jobdir / f"refused-{os.getpid()}.json", {"pid": os.getpid(), "reason": what}
            )
        sys.stderr.write(f"supervisor: {what}\n")
        if not procs.lock_is_held(jobdir / protocol.LOCK):
            end_orphans(jobdir, os.environ.get(protocol.ENV_NONCE, ""))
        return 1
    try:
        Supervisor(job, jobdir, rank).run(signals)
    finally:
        if not procs.lock_is_held(jobdir / protocol.LOCK):
            end_orphans(jobdir, job.nonce)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
