"""Signals as something to wait for together with files: the agent and the supervisors sleep until something happens."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any


class Wakeup:
    """Collects signals in `seen` and ends a `wait` when one comes.

    A process that polls in a loop steals time from the ranks; this one sleeps. Main thread only.
    """

    def __init__(self, *numbers: int) -> None:
        self.seen: set[int] = set()
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.seen.add(number)

    def asked_to_end(self) -> bool:
        """Whether SIGTERM, SIGINT or SIGHUP came."""
        return bool(self.seen & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

    def wait(self, seconds: float, read: Iterable[Any] = (), write: Iterable[Any] = ()) -> set[Any]:
        """Sleep at most `seconds`; return what of `read` and `write` is ready."""
        ready, writable, _ = select.select([self._read, *read], [*write], [], seconds)
        if self._read in ready:
            ready.remove(self._read)
            while len(os.read(self._read, 4096)) == 4096:
                pass
        return {*ready, *writable}
