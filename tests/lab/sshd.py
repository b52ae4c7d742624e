"""A real sshd on loopback with its own host key, user key, known_hosts and port; nothing of the user's is touched.

from tests.lab.sshd import sshd    # a pytest fixture: one server for the session
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.cluster import ClusterHost

SBIN = "/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin"
PRIVILEGE_SEPARATION = Path("/run/sshd")  # sshd started by root on Debian wants it; its service would make it


def find_sshd() -> str | None:
    """The absolute path of sshd, which insists on being started by one."""
    return shutil.which("sshd") or shutil.which("sshd", path=SBIN)


def make_key(path: Path, kind: str = "ed25519") -> str:
    """Make a key without a passphrase; return its public half, "ssh-ed25519 AAAA..."."""
    command = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "shardbench lab", "-f", str(path)]
    made = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(f"ssh-keygen fails: {made.stdout}{made.stderr}")
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


@dataclass
class Sshd:
    """One running server and everything a client needs to trust it and to be trusted by it."""

    folder: Path
    process: subprocess.Popen[bytes]
    port: int
    host_key: str  # public, ed25519
    other_host_key: str  # public, ecdsa
    user_key: Path
    known_hosts: Path

    @property
    def known_name(self) -> str:
        return f"[127.0.0.1]:{self.port}"

    def host(self, **changes: Any) -> ClusterHost:
        """The server as a cluster file would describe it."""
        described = {
            "ssh": "127.0.0.1",
            "name": "lab",
            "user": getpass.getuser(),
            "port": self.port,
            "key": self.user_key,
            "known_hosts": self.known_hosts,
            "python": sys.executable,
            "workdir": str(self.folder / "work"),
            # A choice that this machine's CPU needs to compute right; nothing else of the environment passes.
            "env": {name: os.environ[name] for name in ("OPENBLAS_CORETYPE",) if name in os.environ},
        }
        return ClusterHost(**{**described, **changes})

    def sessions(self) -> list[psutil.Process]:
        """The server's processes of open connections."""
        server = psutil.Process(self.process.pid)
        return [child for child in server.children(recursive=True) if child.name().startswith("sshd")]

    def signal_sessions(self, number: int) -> None:
        """Send a signal to every process of every open connection, by pid."""
        for session in self.sessions():
            _signal(session, number)

    def stop(self) -> None:
        sessions = self.sessions()
        self.process.terminate()
        self.process.wait(10)
        for session in sessions:
            _signal(session, 9)


def _signal(process: psutil.Process, number: int) -> None:
    """Signal a process that may have ended meanwhile."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def start_sshd(folder: Path) -> Sshd:
    """Start a server whose files all lie in `folder`.

    Raises:
        RuntimeError: it doesn't come up; the message is its log.
    """
    binary = find_sshd()
    assert binary is not None
    if os.getuid() == 0 and sys.platform == "linux":
        PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    host_key = make_key(folder / "host_key")
    other_host_key = make_key(folder / "other_host_key", "ecdsa")
    user_key = make_key(folder / "user_key")
    (folder / "authorized_keys").write_text(f"{user_key}\n")
    log = folder / "sshd.log"
    for _ in range(5):  # the port may be taken between looking and binding
        port = _free_port()
        config = folder / "sshd_config"
        config.write_text(_config(folder, port))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [binary, "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        if _answers(process, port):
            break
        process.kill()
        process.wait()
    else:
        raise RuntimeError(f"sshd does not start: {log.read_text(errors='replace')}")
    known_hosts = folder / "known_hosts"
    known_hosts.write_text(f"[127.0.0.1]:{port} {host_key}\n")
    return Sshd(folder, process, port, host_key, other_host_key, folder / "user_key", known_hosts)


def _config(folder: Path, port: int) -> str:
    def quoted(name: str) -> str:
        return f'"{folder / name}"'

    # Keys only; the strict modes would complain about a temporary folder's parents; PAM would want root.
    return "\n".join(
        [
            "ListenAddress 127.0.0.1",
            f"Port {port}",
            f"HostKey {quoted('host_key')}",
            f"HostKey {quoted('other_host_key')}",
            f"PidFile {quoted('sshd.pid')}",
            f"AuthorizedKeysFile {quoted('authorized_keys')}",
            "PubkeyAuthentication yes",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "StrictModes no",
            "UsePAM no",
            "UseDNS no",
            "PrintMotd no",
            "LogLevel VERBOSE",
            "Subsystem sftp internal-sftp",
            "",
        ]
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Whether the server greets; False when it ended or takes too long."""
    until = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < until:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as probe:
                if probe.recv(4) == b"SSH-":
                    return True
        except OSError:
            time.sleep(0.02)
    return False


@pytest.fixture(scope="session")
def sshd() -> Iterator[Sshd]:
    """One real server for the whole session."""
    if find_sshd() is None or shutil.which("ssh-keygen") is None:
        pytest.skip("no sshd on this machine: install openssh-server to run the tests of the remote path")
    # Not pytest's own folder: a short path, since sockets are made below it.
    with tempfile.TemporaryDirectory(prefix="sbl-") as name:
        folder = Path(name).resolve()
        server = start_sshd(folder)
        try:
            yield server
        finally:
            server.stop()
