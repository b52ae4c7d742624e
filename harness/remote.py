"""A machine reached over ssh, as a `harness.hosts.Host`: what `LocalHost` does here, done there.

    with SshHost(cluster.head_host) as host:
        verdict = run_job(host, spec, into, on_event)

Connecting checks the host's key, makes the workdir, brings the code and asks the interpreter what it can import.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Self

from harness import probe, protocol
from harness.channels import Process
from harness.cluster import ClusterHost
from harness.deploy import deploy
from harness.errors import UsageError
from harness.hosts import COLLECTED
from harness.remotefs import RemoteFiles
from harness.ssh import Connection, Timeouts

PROBE_SECONDS = 60.0  # an interpreter on a cold disk takes its time
SYSTEM_PATH = "/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
NEEDED = (
    "mlx.core",
    "mlx_lm",
    "psutil",
)  # what every job imports; what a family needs besides, its plan says

# From the code's folder: with -m and - the current folder comes first, and a home may hold a `harness` of its own.
_ENTER = 'cd "$1" && shift && exec "$@"'
_ENTER_LISTED = 'cd "$1" && . "$2" && rm -f "$2" && shift 2 && exec "$@"'
_AGENT_ENV = "agent.env"
_NOT_FOUND = (126, 127)

_PROBE_MARK = "shardbench-probe "


class SshHost:
    """One remote host, connected, with this tree's code on it.

    Attributes:
        name: the host's name in the cluster file.
        python: the absolute path of the interpreter that jobs use there.
        env: what the cluster file wants in the environment of every rank on it.
        facts: what its interpreter said: `version`, `packages` and their versions, `memory` in bytes.
        code: where the code lies there.
    """

    def __init__(
        self,
        host: ClusterHost,
        *,
        packages: Mapping[str, Path] | None = None,
        timeouts: Timeouts | None = None,
        home: Path | None = None,
    ) -> None:
        """Connect and make ready: a second time takes no longer than the host's interpreter needs to start.

        Args:
            host: from the cluster file.
            packages: import name -> source to bring along; `sharding` and `harness` unless given.
            timeouts: how patient to be.
            home: whose `.ssh` folder counts; the user's own unless given.

        Raises:
            Unreachable: no verified connection can be made.
            UsageError: the cluster file names an interpreter or workdir that can't be used.
        """
        if host.python is None:
            raise UsageError(
                f"{host.name}: no interpreter; give the host `python`, the absolute path of one that has mlx and mlx-lm"
            )
        self.name, self.python, self.env = host.name, host.python, dict(host.env)
        self._host, self._packages, self._timeouts, self._home = host, packages, timeouts, home
        self._nonces: dict[str, str] = {}
        self._connect()

    def _connect(self) -> None:
        self.connection = Connection.open(self._host, self._timeouts, self._home)
        try:
            self.files = RemoteFiles(self.connection, self._host.workdir)
            self.code = deploy(self.files, self._packages)
            self.facts = self._probe()
            if self.facts["digest"] != self.code.digest:
                self.code = deploy(self.files, self._packages, replace=True)
                self.facts = self._probe()
            if self.facts["digest"] != self.code.digest:
                raise UsageError(
                    f"{self.name}: {self.code.path} does not keep what is sent; try another `workdir`"
                )
        except BaseException:
            self.close()
            raise

    def create_job_dir(self, nonce: str) -> str:
        """Make `<workdir>/jobs/<nonce>` (0700), shortened as on this machine, and return its absolute path.

        A connection that an earlier job lost is made anew: the next case may find the host back.
        """
        if not re.fullmatch(r"[0-9a-f]{12,64}", nonce):
            raise ValueError(f"nonce {nonce!r}: hexadecimal digits are needed")
        if not self.connection.alive:
            self.close()
            self._connect()
        jobdir = self.files.root / "jobs" / nonce[:12]
        self.files.make_folder(jobdir, fresh=True)
        self._nonces[str(jobdir)] = nonce
        return str(jobdir)

    def put(self, source: Path, target: str) -> None:
        """Copy a local file into the workdir, mode 0600."""
        self.files.put(source, PurePosixPath(target))

    def write(self, target: str, data: bytes, mode: int = 0o600) -> None:
        """Write a file in the workdir, whole or not at all."""
        self.files.write(PurePosixPath(target), data, mode)

    def start_agent(self, jobdir: str) -> SshAgent:
        """Start `python -m harness.agent JOBDIR` there; sshd gives it a session of its own and no terminal.

        Raises:
            Unreachable: the connection is lost, or the login shell there doesn't run commands.
        """
        # In a file and not on the command line, where `ps` would show what may be a token.
        listed = PurePosixPath(jobdir) / _AGENT_ENV
        pairs = {**self.env, **self._environment()}
        if jobdir in self._nonces:
            pairs[protocol.ENV_NONCE] = self._nonces[jobdir]
        text = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in pairs.items())
        self.files.write(listed, text.encode())
        command = [self.python, "-m", "harness.agent", jobdir]
        process = self.connection.start(
            ["env", "-i", "/bin/sh", "-c", _ENTER_LISTED, "sh", str(self.code.path), str(listed), *command],
            PROBE_SECONDS,
        )
        return SshAgent(self.connection, process)

    def collect(self, jobdir: str, into: Path) -> None:
        """Copy `COLLECTED` and every file in `rank-<r>/` into a local folder; links and hidden files are left."""
        source = PurePosixPath(jobdir)
        wanted: list[PurePosixPath] = []
        try:
            names = self.files.names(source)
        except FileNotFoundError:
            names = {}
        for name, mode in names.items():
            if name in COLLECTED:
                wanted.append(source / name)
            elif re.fullmatch(r"rank-\d+", name) and stat.S_ISDIR(mode):
                wanted += [
                    source / name / inner for inner in self.files.names(source / name) if inner[0] != "."
                ]
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(wanted):
            # A file can go, or be no file at all; what is there is still worth having.
            with contextlib.suppress(FileNotFoundError):
                self.files.get(path, into / path.relative_to(source))

    def remove(self, jobdir: str) -> None:
        """Remove a directory made by `create_job_dir`; no error when it is gone.

        Raises:
            ValueError: it is anything else.
        """
        path = PurePosixPath(jobdir)
        if path.parent != self.files.root / "jobs" or not re.fullmatch(r"[0-9a-f]{12}", path.name):
            raise ValueError(f"{jobdir}: not a job directory of {self.name}")
        self.files.remove_tree(path)
        self._nonces.pop(jobdir, None)

    def close(self) -> None:
        """Hang up; an agent still running reads the end of its stdin."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _environment(self) -> dict[str, str]:
        """What every process there gets besides the host's `env`: nothing is inherited from a login shell's profile,
        which may differ from one way of logging in to the next."""
        user = self.connection.to.user
        path = f"{PurePosixPath(self.python).parent}:{self.env.get('PATH', SYSTEM_PATH)}"
        packages = ":".join(filter(None, [str(self.code.path), self.env.get("PYTHONPATH", "")]))
        named = {"HOME": str(self.files.home), "USER": user, "LOGNAME": user, "SHELL": "/bin/sh"}
        return {**named, "PATH": path, "PYTHONPATH": packages, "PYTHONUTF8": "1"}

    def _probe(self) -> dict[str, Any]:
        """Ask the interpreter for its version, what it can import, and the digest of the code it would run."""
        question = [self.python, "-", _PROBE_MARK, ",".join(NEEDED), str(self.code.path)]
        program = Path(probe.__file__).read_bytes()
        pairs = [f"{name}={value}" for name, value in self._environment().items()]
        # A second shell, not `env` alone: an interpreter whose path holds a `=` would count as a variable.
        enter = ["env", "-i", *pairs, "/bin/sh", "-c", _ENTER, "sh", str(self.code.path)]
        status, out, err = self.connection.run([*enter, *question], PROBE_SECONDS, program)
        remedy = "fix `python` in the cluster file"
        if status in _NOT_FOUND:
            raise UsageError(f"{self.name}: python {self.python!r} can't be run there; {remedy}")
        answers = [line for line in out.splitlines() if line.startswith(_PROBE_MARK)]
        if status or not answers:
            said = (err.strip().splitlines() or ["it printed nothing"])[-1][:200]
            raise UsageError(f"{self.name}: python {self.python!r} fails (status {status}): {said}; {remedy}")
        facts: dict[str, Any] = json.loads(answers[-1].removeprefix(_PROBE_MARK))
        version = ".".join(map(str, facts["version"]))
        if facts["version"] < [3, 11]:
            raise UsageError(
                f"{self.name}: python {self.python!r} is {version}, and 3.11 is needed; {remedy}"
            )
        if facts["missing"]:
            raise UsageError(
                f"{self.name}: python {self.python!r} has no {', '.join(facts['missing'])}; install them there "
                f"(pip install shardbench), or {remedy}"
            )
        return facts


class SshAgent:
    """A `harness.hosts.Agent` at the far end of a channel."""

    def __init__(self, connection: Connection, process: Process) -> None:
        self._connection = connection
        self._process = process

    def lines(self, timeout: float) -> Iterator[str]:
        """Yield each line of its stdout; end when none came for `timeout` seconds, or at the end of stdout.

        Raises:
            Unreachable: the connection was lost.
        """
        return self._process.lines(timeout)

    def close_stdin(self) -> None:
        """Cut the lifeline; no error when it is cut already."""
        self._process.close_stdin()

    def wait(self, timeout: float) -> int | None:
        """Its exit status (-1: killed by a signal), or None when it still runs after `timeout` seconds.

        Raises:
            Unreachable: the connection was lost.
        """
        return self._process.wait(timeout)

    def kill(self) -> None:
        """SIGKILL; no error when it has ended, or over a lost connection, where the cut lifeline has to do."""
        self.close_stdin()
        self._connection.kill(self._process)

    def errors(self) -> str:
        """The end of its stderr."""
        return self._process.errors()
