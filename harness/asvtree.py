"""asv's result tree as a place that several processes write and any of them may die in.

asv itself writes its files in place and without a lock: two writers lose results, and a crash leaves half a file that
asv later passes over with a warning. Here its classes write to a staging folder under a lock, and each finished file is
moved to its place in one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.runs import sync_folder

LOCK = ".asv.lock"
STAGING = ".asv.staging"


class Busy(Exception):
    """Another process has held the tree's lock for as long as this one was willing to wait."""


@dataclass
class Tree:
    """asv's tree while this process holds its lock."""

    root: Path
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def staging(self) -> Path:
        """Where asv's classes write."""
        return self.root / STAGING

    def publish(self, relative: Path) -> None:
        """Move a file that asv's classes wrote to the staging folder to its place, in one step."""
        source, target = self.staging / relative, self.root / relative
        if target.is_file() and target.read_bytes() == source.read_bytes():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(source, target)
        sync_folder(target.parent)
        self.files.append(relative)

    def set_aside(self, path: Path, reason: object) -> None:
        """Take a damaged file out of asv's sight, but keep it."""
        aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
        path.rename(aside)
        self.notes.append(f"{path.relative_to(self.root)} was damaged ({reason}) and is now {aside.name}")


@contextlib.contextmanager
def locked(results_dir: Path, seconds: float) -> Iterator[Tree]:
    """Hold the tree's lock; the kernel frees it when the process ends, however that happens. Raises Busy."""
    with (results_dir / LOCK).open("a") as stream:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Busy from None
                time.sleep(0.05)
        staging = results_dir / STAGING
        shutil.rmtree(staging, ignore_errors=True)  # what a crashed writer left
        staging.mkdir()
        try:
            yield Tree(results_dir)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def unreadable() -> tuple[type[Exception], ...]:
    """Return what asv's loaders raise on a damaged file: asv's own error, or whatever the odd content leads to."""
    from asv.util import UserError

    return (UserError, AttributeError, KeyError, TypeError, ValueError, IndexError)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
