"""Where an ssh connection really goes: the cluster file first, then ~/.ssh/config, then ssh's own defaults."""

from __future__ import annotations

import getpass
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko

from harness.cluster import ClusterHost
from harness.errors import UsageError
from harness.hostkeys import SYSTEM_FILES, known_name

SSH_PORT = 22
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True)
class Route:
    """Where a connection really goes, after ~/.ssh/config had its say."""

    label: str
    hostname: str
    port: int
    user: str
    keys: tuple[Path, ...]
    known_hosts: tuple[Path, ...]
    known_name: str
    use_agent: bool


def route(host: ClusterHost, home: Path | None = None) -> Route:
    """Resolve `host`: what the cluster file says wins over ~/.ssh/config, which wins over ssh's defaults.

    Raises:
        UsageError: the configuration can't be read, or asks for a jump host.
    """
    folder = (home or Path.home()) / ".ssh"
    config = _lookup(folder / "config", host)
    for key in ("proxyjump", "proxycommand"):
        if config.get(key, "none") not in {"none", None}:
            raise UsageError(
                f"{host.name}: {folder / 'config'} reaches {host.ssh} through a {key}, which is not supported; "
                "give a direct address as `ssh` in the cluster file"
            )
    hostname = str(config.get("hostname", host.ssh))
    port = host.port or int(config.get("port", SSH_PORT))
    if host.key is not None:
        keys: tuple[Path, ...] = (host.key,)
        agent = False
    else:
        named = [Path(name).expanduser() for name in config.get("identityfile", [])]
        agent = str(config.get("identitiesonly", "no")).lower() != "yes"
        keys = tuple(key for key in named or [folder / name for name in DEFAULT_KEYS] if key.is_file())
    if host.known_hosts is not None:
        user_files = [host.known_hosts]
    elif "userknownhostsfile" in config:
        user_files = [Path(name).expanduser() for name in shlex.split(str(config["userknownhostsfile"]))]
    else:
        user_files = [folder / "known_hosts"]
    alias = config.get("hostkeyalias")
    return Route(
        label=host.name,
        hostname=hostname,
        port=port,
        user=host.user or str(config.get("user", getpass.getuser())),
        keys=keys,
        known_hosts=(*SYSTEM_FILES, *user_files),
        known_name=str(alias).lower() if alias else known_name(hostname, port),
        use_agent=agent,
    )


def _lookup(path: Path, host: ClusterHost) -> dict[str, Any]:
    try:
        lines = list(_included(path, path.parent)) if path.is_file() else []
        config = paramiko.SSHConfig()
        config.parse(lines)
        found = dict(config.lookup(host.ssh))
        int(found.get("port", SSH_PORT))
        return found
    # paramiko raises ImportError for `Match exec` when `invoke` is missing.
    except (OSError, ValueError, ImportError, paramiko.SSHException) as error:
        raise UsageError(f"{host.name}: {path} can't be used for {host.ssh}: {one_line(error)}") from None


def _included(path: Path, folder: Path, depth: int = 0) -> Iterator[str]:
    """The lines of a configuration with its `Include`s in place, which paramiko passes over. The block that an Include
    stood in goes on after it, as with OpenSSH; an Include inside a Host block counts for every host here."""
    block = "Host *"
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.strip().replace("=", " ", 1).split(None, 1)
        keyword = words[0].lower() if words else ""
        if keyword in {"host", "match"}:
            block = line
        if keyword != "include" or len(words) == 1:
            yield line
            continue
        if depth > 15:  # OpenSSH's limit, which also ends a file that includes itself
            raise ValueError(f"includes nested too deep at {path}")
        for pattern in shlex.split(words[1]):
            base = Path(pattern).expanduser()
            for file in sorted(base.parent.glob(base.name) if base.is_absolute() else folder.glob(pattern)):
                yield from _included(file, folder, depth + 1)
        yield block


def one_line(error: object) -> str:
    """What an exception says, without line breaks."""
    if isinstance(error, TimeoutError):
        return "timed out"
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(str(text).split()) or type(error).__name__
