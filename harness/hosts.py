"""The seam between this machine and another: where a job's directory is made, its agent started, its evidence kept.

`LocalHost` is this machine; `harness.remote.SshHost` is the same over ssh. `harness.launch.run_job` knows only `Host`.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from harness import procs, protocol

COLLECTED = (protocol.VERDICT, protocol.AGENT_LOG, protocol.LAUNCHER_LOG)  # besides every file of rank-<r>/
STALE_SECONDS = 24 * 3600.0


class Agent(Protocol):
    """A running `python -m harness.agent JOBDIR`. Its stdin is the lifeline: at its end the agent ends the job."""

    def lines(self, timeout: float) -> Iterator[str]:
        """Yield each whole line of its stdout; end when none came for `timeout` seconds, or at the end of stdout.

        Raises Unreachable when the connection is lost.
        """

    def close_stdin(self) -> None:
        """Cut the lifeline; no error when it is cut already."""

    def wait(self, timeout: float) -> int | None:
        """Its exit status (negative: the signal that killed it), or None when it still runs after `timeout` seconds."""

    def kill(self) -> None:
        """End the agent at once (SIGKILL where that is possible); no error when it has ended."""


class Host(Protocol):
    """A machine that can run a job. Every method may raise Unreachable."""

    name: str
    python: str  # absolute path of the interpreter that jobs use there

    def create_job_dir(self, nonce: str) -> str:
        """Make an empty private directory (0700) for the job and return its absolute path on the host."""

    def put(self, source: Path, target: str) -> None:
        """Copy a local file to the host, mode 0600."""

    def write(self, target: str, data: bytes, mode: int = 0o600) -> None:
        """Write a file on the host, whole or not at all."""

    def start_agent(self, jobdir: str) -> Agent:
        """Start the agent of the job, in a session of its own, with a lifeline to this process."""

    def collect(self, jobdir: str, into: Path) -> None:
        """Copy `COLLECTED` and every file in `rank-<r>/` into a local folder."""

    def remove(self, jobdir: str) -> None:
        """Remove a directory made by `create_job_dir`; no error when it is gone."""


class LocalAgent:
    """An agent on this machine, at the other end of two pipes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin
        assert process.stdout
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._pending = bytearray()
        self._ended = False
        os.set_blocking(self._stdout.fileno(), False)

    def lines(self, timeout: float) -> Iterator[str]:
        until = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while True:
                while (end := self._pending.find(b"\n")) >= 0:
                    line = self._pending[:end].decode(errors="replace")
                    del self._pending[: end + 1]
                    yield line
                    until = time.monotonic() + timeout
                if self._ended or not selector.select(max(0.0, until - time.monotonic())):
                    return
                data = self._stdout.read(1 << 20)
                if data is not None:  # None: readable no more by the time it was read
                    self._ended = not data
                    self._pending += data

    def close_stdin(self) -> None:
        self._stdin.close()

    def wait(self, timeout: float) -> int | None:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()


class LocalHost:
    """This machine. The agent gets this process's environment, less what an outer launcher left in it."""

    name = "localhost"

    def __init__(self, python: str = sys.executable, root: Path | None = None) -> None:
        self.python = python
        self._root = root or Path(tempfile.gettempdir()) / f"shardbench-{os.getuid()}" / "jobs"

    def create_job_dir(self, nonce: str) -> str:
        protocol.private_folder(self._root.parent)
        root = protocol.private_folder(self._root)
        _prune(root)
        jobdir = root / nonce[:12]  # short: on macOS some of the paths below it go into Unix sockets
        jobdir.mkdir(mode=0o700)
        return str(jobdir)

    def put(self, source: Path, target: str) -> None:
        shutil.copyfile(source, target)
        os.chmod(target, 0o600)

    def write(self, target: str, data: bytes, mode: int = 0o600) -> None:
        protocol.write_atomic(Path(target), data, mode)

    def start_agent(self, jobdir: str) -> Agent:
        env = {k: v for k, v in os.environ.items() if not protocol.LAUNCHER_VARIABLES.fullmatch(k)}
        env["PYTHONPATH"] = procs.python_path(env.get("PYTHONPATH", ""))
        env[protocol.ENV_NONCE] = protocol.Job.load(Path(jobdir)).nonce
        process = subprocess.Popen(
            [self.python, "-m", "harness.agent", jobdir],
            cwd=jobdir,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the agent writes agent.log itself
            start_new_session=True,  # a Ctrl-C at the terminal is for the controller; it ends the job in order
        )
        return LocalAgent(process)

    def collect(self, jobdir: str, into: Path) -> None:
        source = Path(jobdir)
        for path in [*(source / name for name in COLLECTED), *sorted(source.glob("rank-*/*"))]:
            if path.is_file() and not path.is_symlink() and not path.name.startswith("."):
                target = into / path.relative_to(source)
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                shutil.copyfile(path, target)

    def remove(self, jobdir: str) -> None:
        if Path(jobdir).parent != self._root:
            raise ValueError(f"{jobdir}: not a job directory of this host")
        shutil.rmtree(jobdir, ignore_errors=True)


def _prune(root: Path) -> None:
    """Remove what jobs left whose controller died: their processes are long gone, their logs were for a day."""
    for jobdir in root.iterdir():
        try:
            if time.time() - jobdir.stat().st_mtime > STALE_SECONDS and not procs.lock_is_held(
                jobdir / protocol.LOCK
            ):
                shutil.rmtree(jobdir, ignore_errors=True)
        except OSError:
            continue  # another controller was faster
