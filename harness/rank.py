"""For the program that runs as a rank: who am I, what is asked, and how do I report.

    def main(rank: RankContext) -> int:
        rank.emit({"event": "step", "seconds": 0.01})
        return 0

    if __name__ == "__main__":
        run(main)

Standard library only, and nothing in here waits for another process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from harness import protocol

WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class RankContext:
    """One rank of a job, as its supervisor described it in the environment and `job.json`."""

    rank: int
    ranks: int
    nonce: str
    backend: (
        str  # "mpi" or "ring"; "none" when there is one rank, whatever the job says: nothing to connect to
    )
    jobdir: Path
    work: Mapping[str, Any]
    _supervisor: int = 0
    _writing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @classmethod
    def here(cls) -> RankContext:
        """This process's; ValueError when it was not started by a supervisor, or for another job."""
        env = os.environ
        try:
            rank, ranks, nonce = (env[k] for k in (protocol.ENV_RANK, protocol.ENV_RANKS, protocol.ENV_NONCE))
            jobdir, supervisor = Path(env[protocol.ENV_JOBDIR]), int(env[protocol.ENV_SUPERVISOR])
        except KeyError as missing:
            raise ValueError(f"{missing.args[0]} is not set: a rank is started by its supervisor") from None
        job = protocol.Job.load(jobdir)
        protocol.check(job.nonce == nonce, f"{jobdir}: the directory of another job")
        return cls(int(rank), int(ranks), nonce, env[protocol.ENV_BACKEND], jobdir, job.work, supervisor)

    @property
    def folder(self) -> Path:
        """This rank's own folder; every file in it is brought back with the logs."""
        return protocol.rank_dir(self.jobdir, self.rank)

    def emit(self, event: Mapping[str, Any]) -> None:
        """Append one event, on disk when this returns; from any thread. The controller gets it within moments.

        The moment (`t`, seconds since the epoch) is added. It counts as progress: a rank that emits nothing for the job's `stall_seconds` is taken for hung.
        """
        line = memoryview(json.dumps({"t": round(time.time(), 3), **event}).encode() + b"\n")
        with self._writing:
            handle = os.open(self.folder / protocol.EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                while line:
                    line = line[os.write(handle, line) :]
                os.fsync(handle)
            finally:
                os.close(handle)

    def end_with_supervisor(self) -> None:
        """From now on, end this process within about two seconds of its supervisor's end, without any ceremony.

        On Linux the kernel sees to that by itself. Elsewhere a thread has to look, which needs the interpreter now and
        then: a collective that waits in native code must have released it, as MLX does.
        """

        def watch() -> None:
            while os.getppid() == self._supervisor:
                time.sleep(WATCH_SECONDS)
            os._exit(1)

        threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()


def run(main: Callable[[RankContext], int]) -> NoReturn:
    """The whole life of a rank's process: `main` with its context, and then its end, at the status that `main` returns.

    A rank that failed ends at once, without the interpreter's clean-up. That would have MPI wait for its peers, which
    wait for it: the failure would look like a hang, and only after the job's `stall_seconds`.
    """
    try:
        rank = RankContext.here()
        rank.end_with_supervisor()
        status = main(rank)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status & 0xFF or 1)
    sys.exit(0)
