"""Find, identify and end processes. A pid alone names nobody: it is used again; so it goes with its creation time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from harness import protocol

# Creation times are computed from the boot time, which the system clock moves; a pid is not used again this fast.
_SAME_TIME = 2.0


@dataclass(frozen=True)
class ProcessId:
    """One process for certain: its pid and its creation time in seconds since the epoch."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has `pid` now; None when there is none."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.Error:
            return None

    @classmethod
    def read(cls, record: Any) -> ProcessId | None:
        """From a record with "pid" and "started"; None when it has not both."""
        try:
            return cls(int(record["pid"]), float(record["started"]))
        except (TypeError, KeyError, ValueError):
            return None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def process(self) -> psutil.Process | None:
        """The process if it lives; None when it ended, is a zombie, or its pid belongs to another one."""
        try:
            process = psutil.Process(self.pid)
            if (
                abs(process.create_time() - self.started) > _SAME_TIME
                or process.status() == psutil.STATUS_ZOMBIE
            ):
                return None
        except psutil.Error:
            return None
        return process

    def alive(self) -> bool:
        return self.process() is not None

    def send(self, number: int) -> None:
        """Send a signal if it still lives; never to another process."""
        if (process := self.process()) is not None:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)


def of_job(nonce: str) -> list[psutil.Process]:
    """Every living process but this one that has the job's nonce in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get(protocol.ENV_NONCE) == nonce
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue  # ended meanwhile, or another user's
    return found


def end_all(
    find: Callable[[], Iterable[psutil.Process]], grace: float = 2.0, patience: float = 5.0
) -> list[int]:
    """TERM, after `grace` seconds KILL, until `find` finds nothing; also what is started meanwhile.

    Returns:
        The pids that live on `patience` seconds after the first KILL: empty unless the kernel holds them.
    """
    begun = time.monotonic()
    told: set[int] = set()
    while True:
        alive = [process for process in find() if process.pid != os.getpid()]
        if not alive:
            return []
        elapsed = time.monotonic() - begun
        if elapsed > grace + patience:
            return sorted(process.pid for process in alive)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                if elapsed > grace:
                    process.kill()
                elif process.pid not in told:
                    told.add(process.pid)
                    process.terminate()
                    process.send_signal(signal.SIGCONT)  # one that is stopped can't hear SIGTERM
        time.sleep(0.05)


@contextlib.contextmanager
def gone_is_fine() -> Iterator[None]:
    """Ignore that a process ended while it was looked at."""
    with contextlib.suppress(psutil.Error):
        yield


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """The Open MPI shared memory files that these processes map. Killed, the ranks leave them behind (Linux only)."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            found |= {Path(p) for p in re.findall(r"(/dev/shm/(?:sm|vader)_segment\S+)", maps)}
    return found


def take_lock(path: Path, patience: float = 3.0) -> int | None:
    """Lock a file for this process alone until it ends; None when another holds it for `patience` seconds.

    The descriptor must be kept. A supervisor that asks `lock_is_held` holds the lock for an instant: hence patience.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # close-on-exec: a child must not hold the lock
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(handle)
                return None
            time.sleep(0.02)


def lock_is_held(path: Path) -> bool:
    """Whether a living process has the lock; False also when the file is gone."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def python_path(inherited: str) -> str:
    """PYTHONPATH that finds these packages first, then what it said before: a plain tree needs no installation."""
    here = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join([here, *(p for p in inherited.split(os.pathsep) if p and p != here)])


def die_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` that lets the kernel kill the child when this process dies; None where there is no such thing."""
    if sys.platform != "linux":
        return None
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: after it nothing may be
    parent = os.getpid()

    def set_death_signal() -> None:
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != parent:  # died between fork and prctl
            os._exit(1)

    return set_death_signal
