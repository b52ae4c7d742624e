"""One verified ssh connection: where it goes, how it proves itself, how it notices that the other end is gone.

    with Connection.open(host) as connection:
        connection.run(["/usr/bin/true"])

Never asks anything, never trusts a key by itself, never forwards an agent. Everything that goes wrong on the way is
`Unreachable` with one line that names the host.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import paramiko
from paramiko.auth_strategy import AuthFailure, AuthSource, AuthStrategy, InMemoryPrivateKey

from harness.channels import Process
from harness.cluster import ClusterHost
from harness.errors import Unreachable
from harness.hostkeys import VerifyHostKey
from harness.route import Route, one_line, route

# paramiko reports a lost connection to the root logger with a traceback; every case is reported here in one line.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

TRIES = 3  # a server that starts many sessions at once drops some before their banner (MaxStartups)
MAX_KEYS = 5  # sshd hangs up at the sixth attempt (MaxAuthTries)
KILL_SECONDS = 10.0
# `$$` stays the number of what is run: each of the commands replaces the one before it.
_ANNOUNCE = 'printf "\\n%s %s\\n" "$1" "$$" && shift && exec "$@"'
_MARK = "shardbench-process"


@dataclass(frozen=True)
class Timeouts:
    """Seconds. `silence` is how long the other end may leave a heartbeat unanswered before the connection counts as
    lost; heartbeats are sent every `heartbeat` seconds."""

    connect: float = 10.0
    banner: float = 20.0
    auth: float = 20.0
    channel: float = 20.0
    heartbeat: float = 5.0
    silence: float = 20.0

    def __post_init__(self) -> None:
        if min(self.connect, self.banner, self.auth, self.channel, self.heartbeat, self.silence) <= 0:
            raise ValueError("timeouts are seconds above zero")


class _Keys(AuthStrategy):
    """Key files and the agent's keys, nothing that could ask a question."""

    def __init__(self, to: Route) -> None:
        super().__init__(ssh_config=None)
        self._to = to
        self.problems: list[str] = []
        self.tried = 0

    def get_sources(self) -> Iterator[AuthSource]:
        for key in self._candidates():
            if self.tried == MAX_KEYS:
                self.problems.append(f"more than {MAX_KEYS} keys; name one as `key`")
                return
            self.tried += 1
            yield InMemoryPrivateKey(self._to.user, key)

    def _candidates(self) -> Iterator[paramiko.PKey]:
        for path in self._to.keys:
            try:
                yield paramiko.PKey.from_path(path)
            except OSError as error:
                self.problems.append(f"{path}: {error.strerror}")
            except Exception:  # cryptography's own kinds of "encrypted", "damaged", "unknown type"
                self.problems.append(f"{path}: no key usable without a passphrase (add it to the ssh agent)")
        if self._to.use_agent:
            with contextlib.suppress(paramiko.SSHException):
                yield from paramiko.Agent().get_keys()


@dataclass
class Connection:
    """A connected, verified, authenticated transport with a heartbeat."""

    to: Route
    client: paramiko.SSHClient
    timeouts: Timeouts
    lost: str = ""  # why the connection was given up, when the heartbeat did so
    _stop: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def open(cls, host: ClusterHost, timeouts: Timeouts | None = None, home: Path | None = None) -> Self:
        """Connect to `host`.

        Raises:
            Unreachable: no connection, an untrusted host key, or no key that the host accepts.
            UsageError: ~/.ssh/config can't be used for it.
        """
        to = route(host, home)
        limits = timeouts or Timeouts()
        for attempt in range(1, TRIES + 1):
            begun = time.monotonic()
            try:
                client = _connect(to, limits)
                break
            except _TryAgain as error:
                # One that stays silent until the end of our patience isn't merely busy.
                if attempt == TRIES or time.monotonic() - begun >= min(limits.banner, limits.auth):
                    raise Unreachable(str(error)) from None
                time.sleep(random.uniform(0.2, 0.6) * attempt)
        connection = cls(to=to, client=client, timeouts=limits)
        threading.Thread(target=connection._heartbeat, name=f"heartbeat {to.label}", daemon=True).start()
        return connection

    @property
    def transport(self) -> paramiko.Transport:
        """The live transport.

        Raises:
            Unreachable: the connection is gone.
        """
        transport = self.client.get_transport()
        if transport is None or not transport.is_active():
            raise self.gone()
        return transport

    @property
    def alive(self) -> bool:
        transport = self.client.get_transport()
        return transport is not None and transport.is_active()

    def gone(self, why: object = "") -> Unreachable:
        """The error for a connection that ended under us."""
        reason = self.lost or one_line(why) or "connection lost"
        return Unreachable(f"{self.to.label}: {reason}")

    def give_up(self) -> Unreachable:
        """Hang up on a host that doesn't answer."""
        self.lost = self.lost or f"connection lost (no answer for {self.timeouts.silence:g} s)"
        self.client.close()
        return self.gone()

    def start(self, argv: Sequence[str], patience: float | None = None) -> Process:
        """Start `argv` there, without a terminal: it outlives the connection, its stdin doesn't.

        Args:
            patience: seconds until its first sign of life; a slow login shell needs some.

        Raises:
            Unreachable: the connection was lost, or the login shell there runs no commands.
        """
        process = self._execute(["/bin/sh", "-c", _ANNOUNCE, "sh", _MARK, *argv])
        # What comes before the mark is the greeting of a login shell's profile.
        for line in process.lines(patience or self.timeouts.channel):
            begun = re.fullmatch(rf"{_MARK} (\d+)", line)
            if begun:
                process.pid = begun[1]
                return process
        said = (process.errors().strip().splitlines() or ["it said nothing"])[-1][:200]
        process.close()
        raise Unreachable(f"{self.to.label}: the login shell there starts no command: {said}")

    def run(self, argv: Sequence[str], timeout: float, stdin: bytes = b"") -> tuple[int, str, str]:
        """Run `argv` to its end: exit status, stdout, stderr. When it doesn't end in time it is killed.

        Raises:
            Unreachable: the connection was lost, or the command took longer than `timeout` seconds.
        """
        process = self.start(argv)
        try:
            with contextlib.suppress(OSError):  # it may end without reading; its status tells why
                process.send(stdin)
            process.close_stdin()
            status = process.wait(timeout)
            if status is None:
                self.kill(process)
                raise Unreachable(
                    f"{self.to.label}: {Path(argv[0]).name} gave no answer within {timeout:g} s"
                )
            return status, "\n".join(process.rest()), process.errors()
        finally:
            process.close()

    def kill(self, process: Process) -> None:
        """SIGKILL; no error when it has ended, or when the connection is lost: then the cut lifeline has to do."""
        # As long as its status hasn't come, sshd hasn't let go of the process, and the number is still its own.
        if process.running and process.pid:
            with contextlib.suppress(Unreachable):
                self._execute(["/bin/sh", "-c", 'kill -KILL "$1"', "sh", process.pid]).wait(KILL_SECONDS)

    def _execute(self, argv: Sequence[str]) -> Process:
        with self.guard():
            channel = self.transport.open_session(timeout=self.timeouts.channel)
            channel.settimeout(None)
            channel.exec_command(shlex.join(["exec", *argv]))
        return Process(channel, self)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Turn what paramiko raises over a dying connection into `Unreachable`; errors of the far file system pass."""
        try:
            yield
        except TimeoutError:
            # The answer may still come, and be taken for that to another question: this connection is of no use any more.
            raise self.give_up() from None
        except (paramiko.SSHException, paramiko.SFTPError, EOFError, ConnectionError) as error:
            raise self.gone(error) from None
        except OSError as error:
            if self.alive and "closed" not in str(error).lower():
                raise
            raise self.gone(error) from None

    def close(self) -> None:
        self._stop.set()
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _heartbeat(self) -> None:
        """Ask for an answer every few seconds; a link that was cut without a word is noticed here and nowhere else."""
        answered = threading.Event()
        while not self._stop.wait(self.timeouts.heartbeat):
            if not self.alive:
                return
            answered.clear()
            threading.Thread(target=self._ping, args=(answered,), daemon=True).start()
            if not answered.wait(self.timeouts.silence) and not self._stop.is_set():
                self.give_up()
                return

    def _ping(self, answered: threading.Event) -> None:
        transport = self.client.get_transport()
        if transport is not None:
            with contextlib.suppress(Exception):
                transport.global_request("keepalive@openssh.com", wait=True)
        answered.set()


class _TryAgain(Exception):
    """The server dropped us before it knew us."""


def _connect(to: Route, limits: Timeouts) -> paramiko.SSHClient:
    policy = VerifyHostKey(to.label, to.known_name, to.known_hosts)
    keys = _Keys(to)

    def transport(sock: socket.socket, **options: Any) -> paramiko.Transport:
        made = paramiko.Transport(sock, **options)
        security = made.get_security_options()
        plain = [name for name in security.key_types if "-cert-" not in name]
        security.key_types = tuple(policy.preferred(plain))
        return made

    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(policy)
    where = f"{to.label}: {to.user}@{to.hostname} port {to.port}"
    try:
        client.connect(
            to.hostname,
            port=to.port,
            username=to.user,
            timeout=limits.connect,
            banner_timeout=limits.banner,
            auth_timeout=limits.auth,
            channel_timeout=limits.channel,
            auth_strategy=keys,
            transport_factory=transport,
        )
    except BaseException as error:
        client.close()
        if isinstance(error, Unreachable):
            raise
        if isinstance(error, AuthFailure):
            raise Unreachable(f"{where}: {_refused(to, keys, error)}") from None
        if isinstance(error, socket.gaierror):
            raise Unreachable(f"{where}: no such host name; check `ssh` in the cluster file") from None
        if isinstance(error, (paramiko.SSHException, ConnectionResetError, EOFError)):
            raise _TryAgain(f"{where}: no ssh session: {one_line(error)}") from None
        if isinstance(error, OSError):
            raise Unreachable(f"{where}: {one_line(error)}") from None
        raise
    return client


def _refused(to: Route, keys: _Keys, error: AuthFailure) -> str:
    """Why none of the keys was good."""
    dropped = [
        item.result for item in error.result if not isinstance(item.result, paramiko.AuthenticationException)
    ]
    if dropped:
        return f"connection lost while logging in: {one_line(dropped[-1])}"
    offered = ", ".join(map(str, to.keys)) or "no key file found"
    agent = " and the ssh agent's" if to.use_agent else ""
    problems = f" ({'; '.join(keys.problems)})" if keys.problems else ""
    return (
        f"no key is accepted (tried {offered}{agent}){problems}; add the public key to authorized_keys there, or name "
        "another as `key` in the cluster file"
    )
