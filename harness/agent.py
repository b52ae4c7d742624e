"""`python -m harness.agent JOBDIR`: runs one job on its head host and writes `verdict.json`.

It starts the launcher, follows the ranks' files, forwards their events on its stdout, and ends the job when every rank
has ended, one has failed, none makes progress, time is up, or the controller is gone (end of stdin). It judges by the
ranks' exit records, and writes the verdict only when no process of the job is left.

Started again on a directory whose first agent was killed, it ends what is left of the job and writes that verdict.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from harness import cleanup, launcher, procs, protocol
from harness.judge import Ending, crashed, failed
from harness.tail import EventTail, Outlet
from harness.wakeup import Wakeup

TICK_SECONDS = 0.2
START_SECONDS = 60.0  # for the launcher to start every supervisor; a stall has its own limit
SETTLE_SECONDS = 0.4  # after the first failure: what failed with it is recorded by then
DRAIN_SECONDS = 5.0  # for a controller to take the last events
LOG_LIMIT_BYTES = 256 << 20  # what one rank may print: a failing loop must not fill the disk


class Watch:
    """A running job: what is known of each rank, and when it has ended."""

    def __init__(self, job: protocol.Job, jobdir: Path, started: launcher.Launcher, signals: Wakeup) -> None:
        self.job, self.jobdir, self.launcher, self.signals = job, jobdir, started, signals
        self.outlet = Outlet(sys.stdout.fileno())
        self.stdin_open = True
        self.begun = time.monotonic()
        self.tails = [EventTail(jobdir, rank) for rank in range(job.ranks)]
        self.pids: dict[int, dict[str, Any]] = {}
        self.exits: dict[int, dict[str, Any]] = {}
        self.progress: dict[int, float] = {}  # when each rank last made some

    def run(self) -> Ending:
        """Watch until the job has ended or must end."""
        while (ending := self._look()) is None:
            self._sleep(TICK_SECONDS)
        if ending.outcome == "crashed":
            self._sleep(SETTLE_SECONDS)
            self._read_records()
            if failures := [record for record in self.exits.values() if failed(record)]:
                ending = crashed(failures, self.jobdir) if not self._lost_supervisors() else ending
        return ending

    def drain(self) -> None:
        """Forward what is left of the events, as long as the controller takes it."""
        until = time.monotonic() + DRAIN_SECONDS
        while not self.outlet.gone and time.monotonic() < until:
            new = self._forward()
            if not new and not self.outlet.waiting():
                break
            if self.outlet.waiting():
                self.signals.wait(TICK_SECONDS, write=[self.outlet])
                self.outlet.put([])
        if unreadable := sum(tail.unreadable for tail in self.tails):
            sys.stderr.write(f"agent: {unreadable} lines of events were no JSON objects\n")

    def _sleep(self, seconds: float) -> None:
        read = [sys.stdin.fileno()] if self.stdin_open else []
        ready = self.signals.wait(seconds, read, [self.outlet] if self.outlet.waiting() else [])
        if read and read[0] in ready and not os.read(read[0], 4096):
            self.stdin_open = False
        self._forward()

    def _forward(self) -> bool:
        new = False
        for tail in self.tails:
            if not self.outlet.full() and (lines := tail.lines()):
                new = True
                self.outlet.put(lines)
        self.outlet.put([])
        return new

    def _read_records(self) -> None:
        now = time.monotonic()
        for rank in range(self.job.ranks):
            folder = protocol.rank_dir(self.jobdir, rank)
            if rank not in self.pids and (record := protocol.read_record(folder / protocol.PID)):
                self.pids[rank] = record
                self.progress[rank] = now
            if rank not in self.exits and (record := protocol.read_record(folder / protocol.EXIT)):
                self.exits[rank] = record
            if self.tails[rank].grew():
                self.progress[rank] = now

    def _lost_supervisors(self) -> list[int]:
        """Ranks whose supervisor is gone without having recorded anything: it was killed."""
        lost = [
            rank
            for rank, record in self.pids.items()
            if rank not in self.exits
            and (supervisor := procs.ProcessId.read(record.get("supervisor"))) is not None
            and not supervisor.alive()
        ]
        if lost:  # it may have recorded the end between the two looks
            self._read_records()
        return [rank for rank in lost if rank not in self.exits]

    def _look(self) -> Ending | None:
        self._read_records()
        if lost := self._lost_supervisors():
            return Ending("crashed", f"the supervisor of rank {lost[0]} was killed before the rank had ended")
        if failures := [record for record in self.exits.values() if failed(record)]:
            return crashed(failures, self.jobdir)
        if len(self.exits) == self.job.ranks and not any(record["stopped"] for record in self.exits.values()):
            return Ending("ok", f"{self.job.ranks} of {self.job.ranks} ranks ended at status 0")
        for rank in range(self.job.ranks):
            log = protocol.rank_dir(self.jobdir, rank) / protocol.LOG
            if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
                return Ending("crashed", f"rank {rank} printed more than {LOG_LIMIT_BYTES >> 20} MiB")
        return self._asked_to_end() or self._broken_start() or self._time_is_up()

    def _asked_to_end(self) -> Ending | None:
        if (self.jobdir / protocol.STOP).exists():
            return Ending("crashed", "stopped on request")
        if not self.stdin_open or self.outlet.gone:
            return Ending("crashed", "stopped because the controller is gone")
        if self.signals.asked_to_end():
            return Ending("crashed", "stopped because the agent was told to end")
        return None

    def _broken_start(self) -> Ending | None:
        for path in sorted(self.jobdir.glob("refused-*.json")):
            if record := protocol.read_record(path):
                return Ending("crashed", f"a rank could not begin: {record['reason']}")
        said = protocol.last_line(self.jobdir / protocol.LAUNCHER_LOG)
        said = f": {said}" if said else ""
        if stopped := [rank for rank, record in self.exits.items() if record["stopped"]]:
            return Ending("crashed", f"rank {stopped[0]} was stopped from outside{said}")
        if self.launcher.process.poll() is not None:
            self._read_records()
            running = [rank for rank in range(self.job.ranks) if rank not in self.exits]
            if running:
                return Ending("crashed", f"the launcher ended before rank {running[0]} did{said}")
        missing = [rank for rank in range(self.job.ranks) if rank not in self.pids and rank not in self.exits]
        if missing and time.monotonic() - self.begun > START_SECONDS:
            return Ending("hung", f"rank {missing[0]} did not start within {START_SECONDS:g} s{said}")
        if not missing:
            if not self.launcher.used:
                self.launcher.meter()
            self.launcher.measure()
            self._quiet_launcher()
        return None

    def _quiet_launcher(self) -> None:
        """Over ring, mlx.launch spins a core that the ranks need, and nothing of it is needed until they have ended."""
        if self.job.backend == "ring" and self.job.ranks > 1 and not self.launcher.stopped:
            self.launcher.process.send_signal(signal.SIGSTOP)
            self.launcher.stopped = True

    def _time_is_up(self) -> Ending | None:
        now = time.monotonic()
        if now - self.begun > self.job.deadline_seconds:
            running = [str(rank) for rank in range(self.job.ranks) if rank not in self.exits]
            return Ending(
                "hung",
                f"the deadline of {self.job.deadline_seconds:g} s passed, running: rank {', '.join(running)}",
            )
        silent = {
            rank: now - since
            for rank, since in self.progress.items()
            if rank not in self.exits and now - since > self.job.stall_seconds
        }
        if not silent:
            return None
        # Ranks wait for each other, so all may be silent: one that is stopped is the cause, else the first to fall silent.
        states = {rank: self._state(rank) for rank in silent}
        first = max(silent, key=lambda rank: (states[rank] == "stopped", silent[rank]))
        reason = f"rank {first} ({states[first]}) made no progress for {self.job.stall_seconds:g} s"
        if others := [str(rank) for rank in silent if rank != first]:
            reason += f", nor did rank {', '.join(others)}"
        said = {
            r: protocol.last_line(protocol.rank_dir(self.jobdir, r) / protocol.LOG) for r in [first, *silent]
        }
        # One that failed may be unable to end: MPI has it wait for its peers, who wait for it.
        speaker = next((rank for rank in said if said[rank]), None)
        return Ending(
            "hung", reason if speaker is None else f"{reason}; rank {speaker} last said: {said[speaker]}"
        )

    def _state(self, rank: int) -> str:
        identity = procs.ProcessId.read(self.pids.get(rank))
        process = identity.process() if identity else None
        with procs.gone_is_fine():
            if process is not None:
                return str(process.status())
        return "gone"


def first_run(job: protocol.Job, jobdir: Path, signals: Wakeup) -> dict[str, Any]:
    """Run the job; return the verdict. Whatever happens here, no process is left."""
    watch: Watch | None = None
    started: launcher.Launcher | None = None
    ending = Ending("crashed", "the agent failed")
    try:
        started = launcher.start(job, jobdir, launcher.scratch_folder(jobdir))
        watch = Watch(job, jobdir, started, signals)
        ending = watch.run()
    except OSError as error:
        ending = Ending("crashed", f"the job could not be run: {' '.join(str(error).split())}")
    except Exception as error:
        traceback.print_exc()
        ending = Ending(
            "crashed", f"the agent failed: {type(error).__name__}: {' '.join(str(error).split())}"
        )
    finally:
        survivors = cleanup.end_job(job, jobdir, started, show_stacks=ending.outcome == "hung")
    if watch is not None:
        watch.drain()
    return cleanup.verdict(job, jobdir, ending, started, survivors)


def second_run(job: protocol.Job, jobdir: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    """An agent died before its verdict: end what is left, and say so."""
    said = protocol.last_line(jobdir / protocol.AGENT_LOG)
    survivors = cleanup.end_job(job, jobdir, None, show_stacks=False)
    reason = f"the agent (pid {earlier.get('pid')}) was killed before it had judged" + (
        f": {said}" if said else ""
    )
    return cleanup.verdict(job, jobdir, Ending("crashed", reason), None, survivors)


def main(argv: list[str]) -> int:
    """Run or finish the job in argv[1]; 0 when there is a verdict."""
    jobdir = Path(argv[1]).absolute()
    os.umask(0o077)  # the logs are for this user alone, whatever the host's habit
    log = os.open(jobdir / protocol.AGENT_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, sys.stderr.fileno())
    signals = Wakeup(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    job = protocol.Job.load(jobdir)
    lock = procs.take_lock(jobdir / protocol.LOCK)  # kept until this process ends
    if lock is None:
        sys.stderr.write("agent: another agent runs this job\n")
        return 1
    if protocol.read_record(jobdir / protocol.VERDICT):
        return 0
    earlier = protocol.read_record(jobdir / protocol.AGENT)
    me = procs.ProcessId.of(os.getpid())
    protocol.write_record(jobdir / protocol.AGENT, me.to_json() if me else {"pid": os.getpid()})
    verdict = second_run(job, jobdir, earlier) if earlier else first_run(job, jobdir, signals)
    protocol.write_record(jobdir / protocol.VERDICT, verdict)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
