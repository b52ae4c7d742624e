"""What the processes of a job say to each other: the files of a job directory, and how they are written.

    job.json                      the request; written once, before the agent starts
    alive.lock                    locked by the agent for as long as it lives
    agent.json, launcher.json     who they are: pid and creation time
    stop                          its existence asks the agent to end the job and keep the evidence
    refused-<pid>.json            a supervisor that could not begin, and why
    rank-<r>/pid.json exit.json   the supervisor's records; `exit.json` is the only evidence that a rank ended
    rank-<r>/log events.jsonl     what the rank printed, and what it reported
    verdict.json                  how the job ended

Standard library only: the supervisors and the ranks import this while others are being timed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1
BACKENDS = ("mpi", "ring", "none")
OUTCOMES = ("ok", "wrong", "crashed", "hung", "infeasible", "unreachable")

JOB, LOCK, AGENT, LAUNCHER, STOP, VERDICT = (
    "job.json", "alive.lock", "agent.json", "launcher.json", "stop", "verdict.json",
)  # fmt: skip
AGENT_LOG, LAUNCHER_LOG = "agent.log", "launcher.log"
PID, EXIT, LOG, EVENTS = "pid.json", "exit.json", "log", "events.jsonl"

ENV_RANK, ENV_RANKS, ENV_NONCE = "SHARDBENCH_RANK", "SHARDBENCH_RANKS", "SHARDBENCH_NONCE"
ENV_JOBDIR, ENV_BACKEND, ENV_SUPERVISOR = "SHARDBENCH_JOBDIR", "SHARDBENCH_BACKEND", "SHARDBENCH_SUPERVISOR"

# Left over in a shell that itself runs under a launcher, these make a rank believe it belongs to another job.
LAUNCHER_VARIABLES = re.compile(
    r"(MLX_(RANK|HOSTFILE|WORLD_SIZE|JACCL_\w+|IBV_DEVICES|MPI_LIBNAME)|(OMPI|PMIX|PRTE|PRRTE)_\w+|SHARDBENCH_\w+)"
)

_NONCE = re.compile(r"[0-9a-f]{32}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_OWN_FILES = re.compile(
    r"(job\.json|alive\.lock|agent\..*|launcher\..*|stop|verdict\.json|refused-.*|rank-.*|tmp|shardbench-.*)"
)


def check(condition: object, message: str) -> None:
    """Raise ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_file_name(name: str) -> None:
    """Raise ValueError unless `name` may be an extra file of a job: a plain name, none that the job itself uses."""
    check(
        _FILE_NAME.fullmatch(name),
        f"file {name!r} of a job: use a plain name of letters, digits, '.', '_', '-'",
    )
    check(
        not _OWN_FILES.fullmatch(name),
        f"file {name!r} of a job: the job itself uses that name, choose another",
    )


@dataclass(frozen=True)
class Job:
    """The request, `job.json`.

    Raises:
        ValueError: a field is out of its range; the message names the field, the value and what is allowed.
    """

    nonce: str  # 32 hexadecimal digits; every process of the job has it in its environment
    ranks: int
    backend: str  # "mpi", "ring", or "none": one rank, no launcher
    python: str  # absolute path of the interpreter
    argv: tuple[str, ...]  # the rank's arguments to it; the job directory is appended
    deadline_seconds: float  # of the whole job, from the agent's start
    stall_seconds: float  # a living rank whose events do not grow for so long is hung
    env: Mapping[str, str] = field(default_factory=dict)
    work: Mapping[str, Any] = field(default_factory=dict)  # opaque to all but the rank
    version: int = VERSION

    def __post_init__(self) -> None:
        check(self.version == VERSION, f"job version {self.version!r}: this code understands {VERSION}")
        check(
            isinstance(self.nonce, str) and _NONCE.fullmatch(self.nonce),
            f"nonce {self.nonce!r}: 32 hex digits",
        )
        check(isinstance(self.ranks, int) and self.ranks >= 1, f"ranks {self.ranks!r}: at least 1 is needed")
        check(self.backend in BACKENDS, f"backend {self.backend!r}: one of {', '.join(BACKENDS)}")
        check(
            (self.backend == "none") <= (self.ranks == 1),
            f"backend 'none' with {self.ranks} ranks: more than one rank needs mpi or ring",
        )
        check(os.path.isabs(self.python), f"python {self.python!r}: an absolute path is needed")
        check(
            self.argv and all(isinstance(a, str) for a in self.argv), f"argv {self.argv!r}: words are needed"
        )
        for name in ("deadline_seconds", "stall_seconds"):
            value = getattr(self, name)
            check(isinstance(value, int | float) and 0 < value < float("inf"), f"{name} {value!r}: above 0")
        for key, value in self.env.items():
            check(_VARIABLE.fullmatch(key), f"environment variable {key!r}: not a valid name")
            check(
                isinstance(value, str) and "\0" not in value,
                f"environment variable {key}: its value must be text",
            )

    def to_json(self) -> bytes:
        """As written to `job.json`; TypeError when `work` holds what JSON can't."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def load(cls, jobdir: Path) -> Job:
        """Read `job.json`; ValueError when it is not a job of this version."""
        data = json.loads((jobdir / JOB).read_bytes())
        check(isinstance(data, dict), f"{jobdir / JOB}: an object is needed")
        try:
            return cls(**{**data, "argv": tuple(data.get("argv", ()))})
        except TypeError as error:
            raise ValueError(f"{jobdir / JOB}: {error}") from None


def rank_dir(jobdir: Path, rank: int) -> Path:
    """The folder that the supervisor of `rank` makes and owns."""
    return jobdir / f"rank-{rank}"


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file so that a reader sees all of it or none, also after a crash of this process or of the host."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write one JSON object atomically, mode 0600."""
    write_atomic(path, json.dumps(record).encode() + b"\n")


def read_record(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None when there is no such file, or not (yet) an object in it."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def private_folder(path: Path) -> Path:
    """Make `path` (and its parents) if needed, mode 0700; refuse one that another user owns or could write to.

    Raises:
        PermissionError: it is a link, belongs to someone else, or others may write to it.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    state = path.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(
            f"{path}: not a folder that only this user can write to; remove it or set TMPDIR"
        )
    return path


def last_line(path: Path, limit: int = 300) -> str:
    """The last line of a log that says something, without control characters; "" when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            tail = file.read().decode(errors="replace")
    except OSError:
        return ""
    # Colour codes first, as whole sequences; then whatever else would move a terminal's cursor.
    tail = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", tail)
    lines = [re.sub(r"[^\S ]|[\x00-\x1f\x7f-\x9f]", " ", line).strip() for line in re.split(r"[\r\n]+", tail)]
    said = next((line for line in reversed(lines) if re.search(r"\w", line)), "")
    return said if len(said) <= limit else said[: limit - 1] + "…"


def signal_name(number: int) -> str:
    """ "SIGKILL" for 9; in words for a number without a name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
