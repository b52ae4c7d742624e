"""Which host keys are trusted: known_hosts files as OpenSSH writes and reads them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import paramiko
import pytest

from harness.hostkeys import HostKeyRefused, VerifyHostKey, fingerprint, known_name, lookup
from tests.lab.sshd import make_key

pytestmark = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None,
    reason="no ssh-keygen: install openssh-client to make keys for these tests",
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two public keys."""
    folder = tmp_path_factory.mktemp("keys")
    return [make_key(folder / name) for name in ("one", "two")]


def pkey(public: str) -> paramiko.PKey:
    entry = paramiko.hostkeys.HostKeyEntry.from_line(f"x {public}")
    assert entry is not None
    assert entry.key is not None
    return entry.key


def verdict(file: Path, key: str, name: str = "mac") -> str:
    """ "" when `key` is trusted for `name`, else the refusal."""
    policy = VerifyHostKey("label", name, [file])
    try:
        policy.missing_host_key(paramiko.SSHClient(), name, pkey(key))
    except HostKeyRefused as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("line", "trusted"),
    [
        ("mac {one}", True),
        ("mac {one} a comment", True),
        ("MAC {one}", True),
        ("other,mac {one}", True),
        ("m?c {one}", True),
        ("*,!mac {one}", False),
        ("*.lan {one}", False),
        ("mac {two}", False),
        ("mac {two}\nmac {one}", True),
        ("@revoked mac {one}\nmac {one}", False),
        ("mac {one}\n@revoked * {one}", False),
        ("@revoked mac {two}\nmac {one}", True),
        ("@revoked mac ssh-ed25519 garbage!\nmac {one}", False),
        ("@cert-authority mac {one}", False),
        ("# mac {one}", False),
        ("mac ssh-ed25519", False),
        ("mac ssh-ed25519 garbage!", False),
        ("", False),
    ],
)
def test_what_a_line_trusts(tmp_path: Path, keys: list[str], line: str, trusted: bool) -> None:
    """A key is trusted exactly when a line states it for that name and none revokes it."""
    file = tmp_path / "known_hosts"
    file.write_text(line.format(one=keys[0], two=keys[1]) + "\n")
    assert (verdict(file, keys[0]) == "") is trusted


def test_hashed_names_are_read(tmp_path: Path, keys: list[str]) -> None:
    """A file that ssh-keygen hashed still names its hosts, and those only."""
    file = tmp_path / "known_hosts"
    file.write_text(f"[mac]:2222 {keys[0]}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(file)], check=True, capture_output=True)
    assert "mac" not in file.read_text()
    assert verdict(file, keys[0], "[mac]:2222") == ""
    assert "not known" in verdict(file, keys[0], "[mac]:2223")


def test_a_port_is_part_of_the_name() -> None:
    """Brackets and a port, except for 22, in lower case."""
    assert known_name("Mac", 22) == "mac"
    assert known_name("Mac", 2222) == "[mac]:2222"


def test_brackets_are_no_pattern(tmp_path: Path, keys: list[str]) -> None:
    """A name with a port isn't read as a set of characters."""
    file = tmp_path / "known_hosts"
    file.write_text(f"[mac]:* {keys[0]}\n")
    assert verdict(file, keys[0], "[mac]:2222") == ""
    assert verdict(file, keys[0], "m:2222") != ""


def test_a_changed_key_names_its_line_and_remedy(tmp_path: Path, keys: list[str]) -> None:
    """The refusal says which file and line disagrees, both fingerprints and how to remove the old key."""
    file = tmp_path / "known hosts"
    file.write_text(f"# a comment\nmac {keys[0]}\n")
    message = verdict(file, keys[1])
    assert f"{file}:2" in message
    assert f"ssh-keygen -R mac -f '{file}'" in message
    assert all(fingerprint(pkey(key).asbytes()) in message for key in keys)


def test_an_unknown_key_names_the_file_and_remedy(tmp_path: Path, keys: list[str]) -> None:
    """The refusal says where was looked and how to enrol the host; a missing file is an empty one."""
    message = verdict(tmp_path / "none", keys[0], "[mac]:2222")
    assert "not known" in message
    assert f"ssh-keyscan -p 2222 mac >> {tmp_path}/none" in message


def test_a_known_type_is_asked_for_first(tmp_path: Path, keys: list[str]) -> None:
    """A host known by its RSA key is asked for that one, or its ed25519 key would look like a change."""
    file = tmp_path / "known_hosts"
    file.write_text(f"mac ssh-rsa {keys[0].split()[1]}\n")
    offered = ["ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256"]
    assert VerifyHostKey("label", "mac", [file]).preferred(offered)[:2] == ["rsa-sha2-512", "rsa-sha2-256"]
    assert VerifyHostKey("label", "new", [file]).preferred(offered) == offered


def test_fingerprints_are_ssh_keygens(tmp_path: Path) -> None:
    """A fingerprint can be compared with what ssh-keygen -l prints."""
    public = make_key(tmp_path / "key")
    printed = subprocess.run(
        ["ssh-keygen", "-l", "-f", str(tmp_path / "key.pub")], check=True, capture_output=True, text=True
    ).stdout
    (tmp_path / "known").write_text(f"mac {public}\n")
    assert fingerprint(lookup("mac", [tmp_path / "known"])[0].blob) == printed.split()[1]
