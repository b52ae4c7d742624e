"""Where a connection goes, and every way in which it doesn't come about."""

from __future__ import annotations

import getpass
import signal
import socket
import sys
import threading
from pathlib import Path

import psutil
import pytest

from harness.cluster import ClusterHost
from harness.errors import Unreachable, UsageError
from harness.hostkeys import HostKeyRefused
from harness.remotefs import RemoteFiles
from harness.route import route
from harness.ssh import Connection, Timeouts
from tests.harness.jobs import wait_for
from tests.lab.sshd import Sshd, make_key, sshd

__all__ = ["sshd"]  # a fixture

QUICK = Timeouts(connect=5, banner=5, auth=5, channel=5, heartbeat=0.2, silence=1.0)


def home_with(folder: Path, config: str) -> Path:
    """A home folder whose ~/.ssh/config says `config`, with one key file."""
    (folder / ".ssh").mkdir()
    (folder / ".ssh/config").write_text(config)
    (folder / ".ssh/id_ed25519").touch()
    return folder


def refused(host: ClusterHost, timeouts: Timeouts = QUICK) -> str:
    """The one line of a connection that must not come about."""
    with pytest.raises(Unreachable) as caught:
        Connection.open(host, timeouts)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def running(text: str) -> list[psutil.Process]:
    """The processes with `text` in their arguments."""
    return [process for process in psutil.process_iter(["cmdline"]) if text in str(process.info["cmdline"])]


def test_an_alias_is_resolved_as_ssh_does(tmp_path: Path) -> None:
    """HostName, User, Port, IdentityFile, UserKnownHostsFile, HostKeyAlias and Include of ~/.ssh/config count."""
    config = f"""
        Include more
        Host mac
            HostName 10.0.0.7
            User me
            Port 2222
            IdentityFile {tmp_path}/a key
            IdentityFile {tmp_path}/none
            UserKnownHostsFile {tmp_path}/known
            IdentitiesOnly yes
        Host *
            User everyone
    """
    (tmp_path / "a key").touch()
    home = home_with(tmp_path, config)
    (home / ".ssh/more").write_text("Host linked\n  HostName 10.0.0.8\n  HostKeyAlias Cluster\n")
    to = route(ClusterHost(ssh="mac", name="m"), home)
    assert (to.hostname, to.user, to.port) == ("10.0.0.7", "me", 2222)
    assert to.keys == (tmp_path / "a key",)
    assert to.known_hosts[-1] == tmp_path / "known"
    assert to.known_name == "[10.0.0.7]:2222"
    assert not to.use_agent
    linked = route(ClusterHost(ssh="linked", name="l"), home)
    assert (linked.hostname, linked.user, linked.known_name) == ("10.0.0.8", "everyone", "cluster")


def test_the_cluster_file_wins(tmp_path: Path) -> None:
    """User, port, key and known_hosts of the cluster file stand above ~/.ssh/config."""
    home = home_with(tmp_path, "Host mac\n  User me\n  Port 2222\n")
    host = ClusterHost(ssh="mac", name="m", user="you", port=1, key=Path("/k"), known_hosts=Path("/h"))
    to = route(host, home)
    assert (to.user, to.port, to.keys, to.known_hosts[-1]) == ("you", 1, (Path("/k"),), Path("/h"))
    assert not to.use_agent


def test_without_a_config_ssh_s_defaults_hold(tmp_path: Path) -> None:
    """An empty home means port 22, the login name, the usual key files and known_hosts."""
    to = route(ClusterHost(ssh="mac", name="m"), home_with(tmp_path, ""))
    assert (to.hostname, to.user, to.port) == ("mac", getpass.getuser(), 22)
    assert (to.keys, to.known_hosts[-1]) == ((tmp_path / ".ssh/id_ed25519",), tmp_path / ".ssh/known_hosts")


@pytest.mark.parametrize(
    "config", ["Host mac\n ProxyJump other\n", "Host mac\n Port ssh\n", "Include config\n", "Host 'mac\n"]
)
def test_a_config_that_can_not_be_used_is_one_line(tmp_path: Path, config: str) -> None:
    """A jump host, a bad value, an endless Include or a syntax error is a refusal that names the file."""
    with pytest.raises(UsageError, match=r"\.ssh/config") as caught:
        route(ClusterHost(ssh="mac", name="m"), home_with(tmp_path, config))
    assert "\n" not in str(caught.value)


def test_an_unknown_host_key_is_refused(sshd: Sshd, tmp_path: Path) -> None:
    """Without a line for the host nothing is sent to it, and the file is not written."""
    known = tmp_path / "known_hosts"
    known.touch()
    with pytest.raises(HostKeyRefused, match="is not known"):
        Connection.open(sshd.host(known_hosts=known), QUICK)
    assert known.read_text() == ""


def test_either_of_a_host_s_keys_will_do(sshd: Sshd, tmp_path: Path) -> None:
    """A host whose ecdsa key is on file is asked for that one, although both sides would rather use ed25519."""
    known = tmp_path / "known_hosts"
    known.write_text(f"{sshd.known_name} {sshd.other_host_key}\n")
    with Connection.open(sshd.host(known_hosts=known), QUICK) as connection:
        assert connection.alive


def test_a_changed_host_key_is_refused(sshd: Sshd, tmp_path: Path) -> None:
    """Another key on file than the one shown is refused with the file, its line and the remedy."""
    known = tmp_path / "known_hosts"
    known.write_text(f"{sshd.known_name} {make_key(tmp_path / 'other')}\n")
    with pytest.raises(HostKeyRefused, match="has changed") as caught:
        Connection.open(sshd.host(known_hosts=known), QUICK)
    assert f"{known}:1" in str(caught.value)
    assert "ssh-keygen -R" in str(caught.value)


def test_a_key_that_is_not_accepted_is_named(sshd: Sshd, tmp_path: Path) -> None:
    """A wrong user key ends in one line with the key's path and what to do."""
    make_key(tmp_path / "stranger")
    message = refused(sshd.host(key=tmp_path / "stranger"))
    assert "no key is accepted" in message
    assert str(tmp_path / "stranger") in message
    assert "authorized_keys" in message


def test_a_file_that_is_no_key_is_named(sshd: Sshd, tmp_path: Path) -> None:
    """A key file with something else in it ends in one line that doesn't repeat what is in it."""
    (tmp_path / "junk").write_text("hunter2")
    message = refused(sshd.host(key=tmp_path / "junk"))
    assert "junk: no key usable" in message
    assert "hunter2" not in message


def test_a_closed_port_is_unreachable() -> None:
    """Nobody listening is one line with the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: refuses, and nobody else gets it
        port = taken.getsockname()[1]
        assert f"127.0.0.1 port {port}" in refused(
            ClusterHost(ssh="127.0.0.1", name="m", port=port, key=Path("/k"))
        )


def test_a_name_that_does_not_resolve_is_unreachable() -> None:
    """A host name nobody knows is said to be that."""
    assert "no such host name" in refused(ClusterHost(ssh="nowhere.invalid", name="m", key=Path("/k")))


def test_a_server_that_never_speaks_is_unreachable() -> None:
    """A port that accepts and stays silent doesn't hold the client beyond its banner timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = ClusterHost(ssh="127.0.0.1", name="m", port=silent.getsockname()[1], key=Path("/k"))
        assert "no ssh session" in refused(host, Timeouts(connect=0.3, banner=0.3))


def test_a_silent_file_server_is_noticed(sshd: Sshd, tmp_path: Path) -> None:
    """A request for a file that nobody answers ends in the same words, and the connection isn't used again."""
    with Connection.open(sshd.host(), Timeouts(heartbeat=60, silence=0.5)) as connection:
        files = RemoteFiles(connection, str(tmp_path / "work"))
        sshd.signal_sessions(signal.SIGSTOP)
        try:
            for _ in range(2):
                with pytest.raises(Unreachable, match=r"lab: connection lost \(no answer for 0\.5 s\)"):
                    files.exists(files.root)
        finally:
            sshd.signal_sessions(signal.SIGKILL)


def test_a_silent_link_is_noticed(sshd: Sshd) -> None:
    """A server that stops answering without closing anything is given up after the stated silence."""
    with Connection.open(sshd.host(), QUICK) as connection:
        process = connection.start(["/bin/sh", "-c", "read line"])
        sshd.signal_sessions(signal.SIGSTOP)
        try:
            with pytest.raises(Unreachable, match=r"lab: connection lost \(no answer for 1 s\)"):
                process.wait(30)
        finally:
            sshd.signal_sessions(signal.SIGKILL)


def test_a_command_that_never_ends_has_a_deadline(sshd: Sshd) -> None:
    """`run` gives up in one line, ends what it started, and the connection stays usable."""
    with Connection.open(sshd.host(), QUICK) as connection:
        with pytest.raises(Unreachable, match=r"gave no answer within 0\.3 s"):
            connection.run([sys.executable, "-c", "import time; time.sleep(86.75)"], 0.3)
        assert wait_for(lambda: not running("time.sleep(86.75)"), 10)
        assert connection.run(["echo", "it's", '"$HOME"', "a\\nb"], 10) == (0, 'it\'s "$HOME" a\\nb', "")


def test_the_status_may_overtake_the_output(sshd: Sshd) -> None:
    """What is printed after the process's status has come, by a child of it, is read all the same."""
    with Connection.open(sshd.host(), QUICK) as connection:
        process = connection.start(["/bin/sh", "-c", "(sleep 0.4; echo late) & exit 7"])
        assert process.wait(10) == 7
        assert list(process.lines(0.0)) == ["late"]


def test_many_connections_at_once_succeed(sshd: Sshd) -> None:
    """Sixteen connections started together all come about: a server that drops some is asked again."""
    failures: list[BaseException] = []

    def connect() -> None:
        try:
            Connection.open(sshd.host()).close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=connect) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
