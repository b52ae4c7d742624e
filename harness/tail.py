"""Follow the event files of a job's ranks: has a file grown, and which whole lines are new."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from harness import protocol

CHUNK = 1 << 20


class EventTail:
    """One rank's `events.jsonl`. Growth is progress, whatever is in the file and whether or not it was read yet."""

    def __init__(self, jobdir: Path, rank: int) -> None:
        self.rank = rank
        self.path = protocol.rank_dir(jobdir, rank) / protocol.EVENTS
        self.unreadable = 0
        self._size = 0
        self._read = 0
        self._partial = b""

    def grew(self) -> bool:
        """Whether the file has grown since the last call."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return False
        grew, self._size = size > self._size, size
        return grew

    def lines(self) -> list[bytes]:
        """The next whole lines (at most about a mebibyte at once), each `{"rank": r, ...event}`; [] when none is new.

        A line that is no JSON object is counted in `unreadable` and left out.
        """
        found: list[bytes] = []
        while not found:  # a line may be longer than a chunk
            try:
                with self.path.open("rb") as file:
                    file.seek(self._read)
                    data = file.read(CHUNK)
            except OSError:
                return found
            if not data:
                return found
            self._read += len(data)
            *whole, self._partial = (self._partial + data).split(b"\n")
            found = [line for raw in whole if (line := self._dress(raw)) is not None]
        return found

    def _dress(self, raw: bytes) -> bytes | None:
        try:
            event: Any = json.loads(raw)
            if not isinstance(event, dict):
                raise ValueError("no object")
        except ValueError:
            self.unreadable += 1
            return None
        return (
            json.dumps({"rank": self.rank, **{k: v for k, v in event.items() if k != "rank"}}).encode()
            + b"\n"
        )


class Outlet:
    """Standard output to a controller that may be slow, stopped or gone: never waits, keeps a bounded backlog."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.gone = False
        self._backlog = bytearray()
        os.set_blocking(handle, False)

    def fileno(self) -> int:
        return self.handle

    def waiting(self) -> bool:
        """Whether something is left to write."""
        return bool(self._backlog) and not self.gone

    def full(self) -> bool:
        """Whether enough is waiting; read no further events then, they are safe in their files."""
        return len(self._backlog) > CHUNK

    def put(self, lines: list[bytes]) -> None:
        """Add whole lines and write what can be written now."""
        for line in lines:
            self._backlog += line
        while self.waiting():
            try:
                written = os.write(self.handle, memoryview(self._backlog)[:65536].tobytes())
            except BlockingIOError:
                return
            except OSError:
                self.gone = True
                return
            del self._backlog[:written]
