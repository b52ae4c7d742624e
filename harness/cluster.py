"""A cluster as its file describes it: `cluster.toml`, or the host file (JSON) that mlx.launch reads.

name = "desk"
backend = "ring"                    # ring | jaccl | jaccl-ring | mpi
head = "mac-a"                      # where jobs start; the first host unless said

[[hosts]]
ssh = "mac-a.local"                 # host name, address, or an alias of ~/.ssh/config; the only key that is needed
name = "mac-a"                      # in tables and logs; `ssh` unless said
user = "me"                         # this and the next three win over ~/.ssh/config
port = 22
key = "~/.ssh/id_ed25519"           # private key file; relative paths count from this file's folder
known_hosts = "lab_known_hosts"     # in the place of ~/.ssh/known_hosts
ips = ["192.168.0.1"]               # where its peers reach it: the ring's data plane
rdma = ["", "rdma_en2"]             # jaccl: the device towards each host, "" for itself
python = "/Users/me/venv/bin/python"
workdir = "/Users/me/shardbench"    # everything the tool writes there; ~/.shardbench unless said
env = { MLX_METAL_FAST_SYNCH = "1" }
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from harness.errors import UsageError

Backend = Literal["ring", "jaccl", "jaccl-ring", "mpi"]
DEFAULT_WORKDIR = "~/.shardbench"
MAX_PORT = 65535

# What the value should have been, by the last name in its path: the remedy half of a message.
_REMEDIES = {
    "name": "a short name without spaces or control characters",
    "backend": "one of ring, jaccl, jaccl-ring, mpi",
    "head": "the name of one of the hosts",
    "hosts": "at least one [[hosts]] entry",
    "ssh": 'a host name, an address or an alias of ~/.ssh/config, such as "mac-a.local"',
    "user": "a login name",
    "port": f"a whole number from 1 to {MAX_PORT}",
    "key": "the path of a private key file",
    "known_hosts": "the path of a known_hosts file",
    "ips": 'a list of addresses, such as ["192.168.0.1"]',
    "rdma": 'one entry a host: null (JSON) or "" (TOML) for the host itself, a device such as "rdma_en2" for each other',
    "python": 'the absolute path of an interpreter on that host, such as "/Users/me/venv/bin/python"',
    "workdir": f'an absolute path on that host, or one that begins with "~/", such as "{DEFAULT_WORKDIR}"',
    "env": 'a table of strings, such as { MLX_METAL_FAST_SYNCH = "1" }',
    "envs": 'a list of "NAME=value"',
}

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Label = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f\x7f-][^\s\x00-\x1f\x7f]*$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)


class ClusterHost(_Model):
    """One machine: how it is reached, how its peers reach it, and where the tool may write."""

    ssh: Label
    name: Label
    user: Label | None = None
    port: int | None = Field(default=None, ge=1, le=MAX_PORT)
    key: Path | None = None
    known_hosts: Path | None = None
    ips: tuple[Label, ...] = ()
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    python: str | None = None
    workdir: str = DEFAULT_WORKDIR
    env: Mapping[str, str] = Field(default_factory=dict)

    @field_validator("python")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and (_CONTROL.search(value) or not PurePosixPath(value).is_absolute()):
            raise ValueError("not an absolute path")
        return value

    @field_validator("workdir")
    @classmethod
    def _somewhere(cls, value: str) -> str:
        path = PurePosixPath(value)
        if _CONTROL.search(value) or ".." in path.parts:
            raise ValueError("has '..' or control characters in it")
        if not (path.is_absolute() or path.parts[:1] == ("~",)):
            raise ValueError("neither absolute nor below ~")
        if len(path.parts) < 2:  # "/" and "~" alone are one part
            raise ValueError("is a whole file system or home, not a folder of its own")
        return str(path)

    @field_validator("env")
    @classmethod
    def _names(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name, text in value.items():
            # The value is not repeated: it may be a token.
            if not _ENV_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of an environment variable")
            if "\x00" in text:
                raise ValueError(f"the value of {name} has a NUL in it")
        return value


class Cluster(_Model):
    """The machines of one cluster and how their ranks talk."""

    name: Label
    backend: Backend
    head: str
    hosts: tuple[ClusterHost, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [host.name for host in self.hosts]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ValueError(
                    f"hosts[{index}].name: {name!r} is used twice; give each host a name of its own"
                )
        if self.head not in names:
            raise ValueError(f"head: {self.head!r} is no host; give one of {', '.join(names)}")
        if len(self.hosts) > 1:
            self._links()
        return self

    def _links(self) -> None:
        """Every rank must be able to reach its peers over the backend asked for."""
        count = len(self.hosts)
        if self.backend != "mpi":
            # The ring dials every host; jaccl only asks the first one how to begin.
            for index, host in enumerate(self.hosts if self.backend == "ring" else self.hosts[:1]):
                if not host.ips:
                    raise ValueError(
                        f"hosts[{index}].ips: {host.name} has none; {self.backend} needs {_REMEDIES['ips']}"
                    )
        if not self.backend.startswith("jaccl"):
            return
        for index, host in enumerate(self.hosts):
            at = f"hosts[{index}].rdma"
            if len(host.rdma) != count:
                raise ValueError(
                    f"{at}: {len(host.rdma)} entries for {count} hosts; give {_REMEDIES['rdma']}"
                )
            if host.rdma[index]:
                raise ValueError(
                    f"{at}[{index}]: {host.rdma[index]!r} links {host.name} to itself; leave it empty"
                )
            peers = (
                {(index - 1) % count, (index + 1) % count}
                if self.backend == "jaccl-ring"
                else set(range(count))
            )
            for peer in sorted(peers - {index}):
                if not host.rdma[peer]:
                    raise ValueError(f"{at}[{peer}]: no device towards {self.hosts[peer].name}; name one")

    @property
    def head_host(self) -> ClusterHost:
        return next(host for host in self.hosts if host.name == self.head)


def load_cluster(path: Path) -> Cluster:
    """Read and check a cluster file: TOML, or mlx's host file when the suffix (or, without one, the text) says JSON.

    Raises:
        UsageError: the file can't be read, or says something impossible; names file, line, value and remedy.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such cluster file; give a cluster.toml or an mlx host file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read as a cluster file: {_reason(error)}") from None
    return _Reader(path, text).cluster()


class _Reader:
    """One file on its way to a `Cluster`; knows where each key stands in it."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        # Without a telling suffix: TOML never begins with a brace, and with a bracket only for a table header.
        start = text.lstrip()
        looks = start.startswith("{") or (start.startswith("[") and not start.startswith("[[hosts"))
        self.json = path.suffix == ".json" or (path.suffix != ".toml" and looks)

    def cluster(self) -> Cluster:
        data = self._json() if self.json else self._toml()
        for host in data["hosts"]:
            if "ssh" in host:
                host.setdefault("name", host["ssh"])
        data.setdefault("name", self.path.stem)
        data.setdefault("backend", "ring")
        data.setdefault("head", data["hosts"][0].get("name", "") if data["hosts"] else "")
        try:
            cluster = Cluster.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise self._refusal(first) from None
        for index, host in enumerate(cluster.hosts):
            for key in ("key", "known_hosts"):
                file = getattr(host, key)
                if file is not None and not file.is_file():
                    raise self.error(("hosts", index, key), f"{str(file)!r} is no file", _REMEDIES[key])
        return cluster

    def _toml(self) -> dict[str, Any]:
        try:
            data = tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{self.path}: not TOML: {error}; see the example in README.md") from None
        data["hosts"] = tuple(self._hosts(data.get("hosts", []), "hosts"))
        return data

    def _json(self) -> dict[str, Any]:
        try:
            data = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{self.path}: not JSON: {_reason(error)}; give an mlx host file or a cluster.toml"
            ) from None
        whole: dict[str, Any] = dict(data) if isinstance(data, dict) else {"hosts": data}
        hosts = whole.get("hosts", [])
        if isinstance(hosts, list) and hosts and all(isinstance(host, list) for host in hosts):
            raise UsageError(
                f"{self.path}: this is the list of addresses that a rank reads (MLX_HOSTFILE); give the launcher's form, "
                '{"hosts": [{"ssh": "mac-a.local", "ips": ["192.168.0.1"]}]}'
            )
        shared = self._envs(whole.pop("envs", []))
        whole["hosts"] = tuple(
            {**host, "env": {**shared, **host.get("env", {})}} for host in self._hosts(hosts, "hosts")
        )
        if whole.get("backend") == "":  # what mlx writes when none was chosen
            del whole["backend"]
        return whole

    def _envs(self, envs: object) -> dict[str, str]:
        if not isinstance(envs, list):
            raise self.error(("envs",), f"{envs!r} is no list", _REMEDIES["envs"])
        pairs = {}
        for index, item in enumerate(envs):
            name, equals, value = str(item).partition("=")
            if not isinstance(item, str) or not equals or not _ENV_NAME.fullmatch(name):
                raise self.error(("envs", index), f"{name!r} is no NAME=value", _REMEDIES["envs"])
            pairs[name] = value
        return pairs

    def _hosts(self, hosts: object, at: str) -> Iterator[dict[str, Any]]:
        """Each host as a dict of Python values: paths resolved against the file, lists made tuples."""
        if not isinstance(hosts, list):
            raise self.error((at,), f"{_short(hosts)} is no list of hosts", _REMEDIES["hosts"])
        for index, host in enumerate(hosts):
            if not isinstance(host, dict):
                raise self.error(
                    (at, index), f"{_short(host)} is no table", 'give at least ssh = "mac-a.local"'
                )
            fixed = dict(host)
            for key in ("key", "known_hosts"):
                if isinstance(fixed.get(key), str):
                    fixed[key] = self.path.parent / Path(fixed[key]).expanduser()
            for key in ("ips", "rdma"):
                if isinstance(fixed.get(key), list):
                    # TOML has no null: an empty device stands for it.
                    fixed[key] = tuple(
                        tuple(item) if isinstance(item, list) else item or None if key == "rdma" else item
                        for item in fixed[key]
                    )
            if not isinstance(fixed.get("env", {}), dict):
                raise self.error((at, index, "env"), "it is no table", _REMEDIES["env"])
            yield fixed

    def _refusal(self, error: Any) -> UsageError:
        """A pydantic error as one line."""
        at = tuple(part for part in error["loc"] if not (isinstance(part, str) and part.endswith("]")))
        message = str(error["msg"]).removeprefix("Value error, ")
        if not at:  # a check across hosts, which names its place itself
            place, _, rest = message.partition(": ")
            return self.error(tuple(_path_parts(place)), rest, "")
        name = next((part for part in reversed(at) if isinstance(part, str)), "")
        if error["type"] == "extra_forbidden":
            known = (ClusterHost if len(at) > 1 else Cluster).model_fields
            return self.error(at, "no such key", f"one of {', '.join(known)}")
        if error["type"] == "missing":
            return self.error(at, "is missing", _REMEDIES.get(name, ""))
        # Environment values may be secrets, so neither they nor what was wrong with them is repeated.
        value = "" if "env" in at else f"{_short(error['input'])} "
        if error["type"] == "value_error":
            return self.error(at, value + message, _REMEDIES.get(name, ""))
        return self.error(at, f"{value}is not valid".lstrip(), _REMEDIES.get(name, message))

    def error(self, at: tuple[str | int, ...], what: str, remedy: str) -> UsageError:
        line = self._line(at) if at else None
        where = f"{self.path}:{line}" if line else str(self.path)
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at).lstrip(".")
        expected = f"; expected {remedy}" if remedy else ""
        return UsageError(f"{where}: {key}: {what}{expected}")

    def _line(self, at: tuple[str | int, ...]) -> int | None:
        """The line where a key (or, for a missing one, its host) stands; None when that can't be told."""
        lines = self.text.splitlines()
        start = 0
        names = [part for part in at if isinstance(part, str)]
        if names[:1] == ["hosts"] and len(at) > 1 and isinstance(at[1], int):
            opening = re.compile(r'"ssh"\s*:' if self.json else r"\s*\[\[\s*hosts\s*\]\]")
            entries = [number for number, line in enumerate(lines) if opening.search(line)]
            if at[1] >= len(entries):
                return None
            start = entries[at[1]]
            end = entries[at[1] + 1] if at[1] + 1 < len(entries) else len(lines)
            names = names[1:]
        else:
            end = len(lines)
        if not names:
            return start + 1
        key = re.compile(
            rf'"{re.escape(names[-1])}"\s*:' if self.json else rf"\s*\[?\[?{re.escape(names[-1])}\b\s*[=\].]"
        )
        for number in range(start, end):
            if key.search(lines[number]) if self.json else key.match(lines[number]):
                return number + 1
        return start + 1 if start or at[0] == "hosts" else None


def _path_parts(place: str) -> Iterator[str | int]:
    """ "hosts[1].rdma" as ("hosts", 1, "rdma")."""
    for part in re.findall(r"[^.\[\]]+", place):
        yield int(part) if part.isdigit() else part


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
