"""Host keys as OpenSSH's known_hosts files state them: trusted, unknown, changed or revoked.

paramiko's own reader knows neither `@revoked` nor patterns, keeps one key per type and forgets where a key stood, so the
files are read here; the decision is still taken inside a `paramiko.RejectPolicy`, which refuses whatever isn't trusted.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko

from harness.errors import Unreachable

SYSTEM_FILES = (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))
_FIELDS = 3  # names, key type, key; a comment may follow


class HostKeyRefused(Unreachable):
    """The host showed a key that isn't known, isn't the known one, or is revoked."""


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file that speaks of the host asked about."""

    file: Path
    line: int
    key_type: str  # as in the file: "ssh-ed25519", "ssh-rsa", ...
    blob: bytes
    revoked: bool

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def fingerprint(blob: bytes) -> str:
    """The SHA256 fingerprint of a public key, written as ssh-keygen writes it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def known_name(hostname: str, port: int) -> str:
    """The name under which known_hosts files list a host: with its port, unless that is 22."""
    return hostname.lower() if port == 22 else f"[{hostname.lower()}]:{port}"


def lookup(name: str, files: Sequence[Path]) -> list[KnownKey]:
    """Every key the files state for `name`, in order; files that are missing or unreadable state none.

    Lines that can't be parsed and `@cert-authority` lines (host certificates aren't used here) are passed over: that
    can only make a host less trusted. An unreadable `@revoked` line can't be passed over so lightly, hence it counts for
    every key of its name when its own key can't be decoded.
    """
    found = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            key = _parse(line, name, file, number)
            if key is not None:
                found.append(key)
    return found


def _parse(line: str, name: str, file: Path, number: int) -> KnownKey | None:
    fields = line.split()
    if not fields or fields[0].startswith("#"):
        return None
    marker = fields.pop(0) if fields[0].startswith("@") else ""
    if marker not in {"", "@revoked"} or len(fields) < _FIELDS or not _matches(fields[0], name):
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except (binascii.Error, ValueError):
        blob = b""
    if not blob and not marker:
        return None
    return KnownKey(file=file, line=number, key_type=fields[1], blob=blob, revoked=bool(marker))


def _matches(patterns: str, name: str) -> bool:
    """Whether a names field (hashed, or patterns with `*`, `?` and a leading `!`) covers `name`."""
    if patterns.startswith("|1|"):
        return _hashed_matches(patterns, name)
    hit = False
    for pattern in patterns.lower().split(","):
        negated = pattern.startswith("!")
        # fnmatch would read the brackets of "[host]:port" as a character class.
        glob = pattern.removeprefix("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(name, glob):
            if negated:
                return False
            hit = True
    return hit


def _hashed_matches(field: str, name: str) -> bool:
    try:
        _, _, salt, digest = field.split("|")
        want = base64.b64decode(digest)
        # SHA1 is what the file format prescribes; it hides names here and decides about no key.
        have = hmac.new(base64.b64decode(salt), name.encode(), "sha1").digest()
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(have, want)


class VerifyHostKey(paramiko.RejectPolicy):
    """paramiko's RejectPolicy with one way to pass: a file states exactly this key, and none revokes it.

    The client must have loaded no keys itself, so that every key comes here.

    Args:
        label: the host's name in messages.
        name: the host's name in known_hosts files (see `known_name`).
        files: the known_hosts files that count; the last one is named in the remedy.
    """

    def __init__(self, label: str, name: str, files: Sequence[Path]) -> None:
        self._label = label
        self._name = name
        self._files = tuple(files)
        self._known = lookup(name, files)

    def preferred(self, offered: Sequence[str]) -> list[str]:
        """`offered` key algorithms, those with a known key first, as OpenSSH does: else a host that
        shows its ed25519 key while its ecdsa key is on file would look changed."""
        types = {key.key_type for key in self._known if not key.revoked}
        if "ssh-rsa" in types:
            types |= {"rsa-sha2-512", "rsa-sha2-256"}
        return sorted(offered, key=lambda algorithm: algorithm not in types)

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Return when the key is trusted.

        Raises:
            HostKeyRefused: it is unknown, changed or revoked; one line with the file and the remedy.
        """
        del client, hostname
        blob = key.asbytes()
        shown = f"{key.get_name()} {fingerprint(blob)}"
        for entry in self._known:
            if entry.revoked and entry.blob in {blob, b""}:
                raise HostKeyRefused(
                    f"{self._label}: its host key {shown} is revoked in {entry.place}; do not connect, ask whoever "
                    "runs the machine"
                )
        trusted = [entry for entry in self._known if not entry.revoked]
        if any(entry.blob == blob for entry in trusted):
            return
        if trusted:
            raise HostKeyRefused(self._changed(trusted, shown))
        file = shlex.quote(str(self._files[-1]))
        raise HostKeyRefused(
            f"{self._label}: host key of {self._name} is not known ({shown}; looked in "
            f"{', '.join(map(str, self._files))}); compare it with `ssh-keygen -lf` of the public host key on the "
            f"machine itself, then add it: ssh-keyscan {_keyscan(self._name)} >> {file}"
        )

    def _changed(self, trusted: Sequence[KnownKey], shown: str) -> str:
        entry = trusted[0]
        remove = f"ssh-keygen -R {shlex.quote(self._name)} -f {shlex.quote(str(entry.file))}"
        return (
            f"{self._label}: host key of {self._name} has changed: it shows {shown}, but {entry.place} says "
            f"{entry.key_type} {fingerprint(entry.blob)}; unless the machine was reinstalled someone may be in "
            f"between; if it was, check the new key on the machine, remove the old one ({remove}) and add the new one"
        )


def _keyscan(name: str) -> str:
    """ssh-keyscan's arguments for a known_hosts name."""
    if name.startswith("["):
        host, _, port = name.removeprefix("[").rpartition("]:")
        return f"-p {port} {shlex.quote(host)}"
    return shlex.quote(name)
