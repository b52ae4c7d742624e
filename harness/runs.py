"""The folder of one run: what was asked, where it ran, and one line for every case that ended.

    results/runs/<run-id>/sweep.json          the request
                          environment.json    versions and host facts
                          records.jsonl       one record a line, appended and fsynced as its case ends
                          logs/               one log a rank

A run can be cut off at any byte: whatever was appended before stays readable, and `RunStore.done` says what a
resumed run need not repeat.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from harness import protocol
from harness.errors import UsageError

SCHEMA = 1
OUTCOMES = ("ok", "wrong", "crashed", "hung", "infeasible", "unreachable")
# A case whose host could not be reached says nothing about the case, so a resumed run tries it again.
RETRIED = frozenset({"unreachable"})
TIMINGS = ("seconds_per_step", "seconds_per_step_interval", "prefill_seconds", "decode_tokens_per_second")

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """As `protocol.write_atomic`, and durable: without the folder's sync a rename can be lost with the power."""
    protocol.write_atomic(path, data, mode)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: without this a rename can be lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clean_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return `record` as strict JSON can hold it, or raise ValueError when it breaks the record's contract.

    A wrong model may well have produced NaN: non-finite numbers become null and are named under `nonfinite`,
    so that no distance is lost and no reader meets invalid JSON. NumPy scalars become plain numbers.
    """
    nonfinite: dict[str, str] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return {
                str(key): walk(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [walk(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if value is None or isinstance(value, str | bool | int):
            return value
        if isinstance(value, Path):
            return str(value)
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, float):
            if math.isfinite(number):
                return number
            nonfinite[path] = str(number)
            return None
        if number is None or isinstance(number, str | bool | int):
            return number
        raise ValueError(f"a record can't hold {path} = {value!r} ({type(value).__name__})")

    clean = walk(record, "")
    clean.setdefault("schema", SCHEMA)
    if not isinstance(clean.get("case"), str) or not clean["case"]:
        raise ValueError("a record needs a `case`")
    if clean.get("outcome") not in OUTCOMES:
        raise ValueError(
            f"outcome {clean.get('outcome')!r} of case {clean['case']} is none of {', '.join(OUTCOMES)}"
        )
    if clean["outcome"] != "ok":
        timed = [name for name in TIMINGS if clean.get(name) is not None or name in nonfinite]
        if timed:
            raise ValueError(f"case {clean['case']} is {clean['outcome']} and can't carry {', '.join(timed)}")
    if nonfinite:
        clean["nonfinite"] = {**clean.get("nonfinite", {}), **nonfinite}
    return clean


def parse_records(data: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the records in `data` (JSON lines) and one sentence for each line that could not be used.

    Unknown fields are kept. A line cut short by a crash, or damaged, costs that line only.
    """
    records: list[dict[str, Any]] = []
    problems: list[str] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            problems.append(f"line {number} is not JSON (cut short?) and was left out")
            continue
        if not isinstance(record, dict) or not isinstance(record.get("case"), str):
            problems.append(f"line {number} names no case and was left out")
        elif record.get("outcome") not in OUTCOMES:
            problems.append(
                f"line {number} has the unknown outcome {record.get('outcome')!r} and was left out"
            )
        else:
            if isinstance(record.get("schema"), int) and record["schema"] > SCHEMA:
                problems.append(f"line {number} is of schema {record['schema']}, newer than {SCHEMA}")
            records.append(record)
    return records, problems


def _new_run_id() -> str:
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


class RunStore:
    """One run folder. Made by `create`, `open` or `at`; reading needs no lock, appending takes the run's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: IO[bytes] | None = None

    @classmethod
    def create(
        cls, root: Path, sweep: Mapping[str, Any], environment: Mapping[str, Any], run_id: str | None = None
    ) -> RunStore:
        """Make `root`/runs/<run-id> with the request and the environment in it, whole or not at all.

        Args:
            root: the results folder (asv's `results_dir`).
            run_id: a name for the run; by default the time in UTC and six random hex digits.

        Raises:
            UsageError: the name is not usable or taken, or the folder can't be written.
        """
        name = _safe_id(run_id) if run_id is not None else _new_run_id()
        runs = root / "runs"
        target = runs / name
        staging = runs / f".new-{secrets.token_hex(6)}"
        try:
            if target.exists():
                raise UsageError(
                    f"run {name} exists in {runs}: choose another name, or continue it with --resume"
                )
            runs.mkdir(parents=True, exist_ok=True)
            staging.mkdir(mode=0o755)
            (staging / "logs").mkdir()
            write_atomic(staging / "sweep.json", _pretty(sweep))
            write_atomic(staging / "environment.json", _pretty(environment))
            write_atomic(staging / "records.jsonl", b"")
            os.rename(staging, target)
            sync_folder(runs)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise UsageError(f"can't make the run folder {target}: {error.strerror or error}") from None
        return cls(target)

    @classmethod
    def open(cls, root: Path, run_id: str) -> RunStore:
        """Return the run `run_id` of the results folder `root`.

        Raises:
            UsageError: no such run, or the name could lead out of the folder.
        """
        return cls.at(root / "runs" / _safe_id(run_id))

    @classmethod
    def at(cls, path: Path) -> RunStore:
        """Return the run in the folder `path`, wherever it lies (a run copied from another machine, say)."""
        if not (path / "sweep.json").is_file():
            known = ", ".join(run.run_id for run in cls.all(path.parent.parent)[-5:])
            hint = (
                f"; the latest runs there are {known}" if known else f"; there are no runs in {path.parent}"
            )
            raise UsageError(f"{path} is no run folder (it has no sweep.json){hint}")
        return cls(path)

    @classmethod
    def find(cls, root: Path, text: str) -> RunStore:
        """Return the run that `text` names: an id in `root`, `latest`, or the path of a run folder."""
        if text == "latest":
            runs = cls.all(root)
            if not runs:
                raise UsageError(f"there are no runs in {root / 'runs'}: make one with `shardbench run`")
            return runs[-1]
        if os.sep in text:
            return cls.at(Path(text))
        return cls.open(root, text)

    @classmethod
    def all(cls, root: Path) -> list[RunStore]:
        """Return the runs of the results folder `root`, oldest first."""
        runs = root / "runs"
        if not runs.is_dir():
            return []
        found = [
            entry
            for entry in runs.iterdir()
            if _RUN_ID.fullmatch(entry.name) and (entry / "sweep.json").is_file()
        ]
        return [cls(entry) for entry in sorted(found, key=lambda entry: entry.name)]

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def logs(self) -> Path:
        """The folder of the ranks' logs, made when it is missing."""
        folder = self.path / "logs"
        folder.mkdir(exist_ok=True)
        return folder

    def sweep(self) -> dict[str, Any]:
        """Return the request. Raises UsageError when sweep.json is damaged."""
        return self._object("sweep.json")

    def environment(self) -> dict[str, Any]:
        """Return the environment record. Raises UsageError when environment.json is damaged."""
        return self._object("environment.json")

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Replace environment.json, as when the ranks have reported what they see."""
        write_atomic(self.path / "environment.json", _pretty(environment))

    def claim(self) -> None:
        """Become the one process that appends to this run, until `close` or the process ends.

        Raises:
            UsageError: another process is writing this run.
        """
        if self._stream is not None:
            return
        stream = (self.path / "records.jsonl").open("ab+")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.close()
            raise UsageError(
                f"run {self.run_id} is being written by another process: wait until it ends, then resume it"
            ) from None
        # What a crash left half-written keeps its own line; the next record must not grow out of it.
        stream.seek(0, os.SEEK_END)
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        self._stream = stream

    def append(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Add one record and return it as it was written; it is on the disk when this returns.

        Raises:
            ValueError: the record breaks its contract (see `clean_record`).
            UsageError: another process is writing this run.
        """
        clean = clean_record(record)
        line = json.dumps(clean, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        self.claim()
        assert self._stream is not None
        self._stream.write(line)
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return clean

    def close(self) -> None:
        """Let another process append."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __enter__(self) -> RunStore:
        self.claim()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def records(self) -> list[dict[str, Any]]:
        """Return the last record of each case, in the order in which the cases first ended."""
        latest: dict[str, dict[str, Any]] = {}
        for record in self._parsed()[0]:
            latest[record["case"]] = record
        return list(latest.values())

    def problems(self) -> list[str]:
        """Return one sentence for each line of records.jsonl that could not be used."""
        return self._parsed()[1]

    def done(self) -> set[str]:
        """Return the cases that a resumed run need not repeat: all with a record, but those that were unreachable."""
        return {record["case"] for record in self.records() if record["outcome"] not in RETRIED}

    def _parsed(self) -> tuple[list[dict[str, Any]], list[str]]:
        try:
            data = (self.path / "records.jsonl").read_bytes()
        except FileNotFoundError:
            return [], []
        return parse_records(data)

    def _object(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            value = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise UsageError(f"run {self.run_id} has no {name}") from None
        except ValueError as error:
            raise UsageError(f"{path} is damaged ({error}): restore it or start a new run") from None
        if not isinstance(value, dict):
            raise UsageError(f"{path} holds no JSON object: restore it or start a new run")
        return value


def _safe_id(run_id: str) -> str:
    if not _RUN_ID.fullmatch(run_id) or ".." in run_id:
        raise UsageError(
            f"run id {run_id!r} is not usable: letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    return run_id


def _pretty(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n").encode()
