"""A process at the far end of an ssh channel: both of its streams drained at all times, never waited for without end."""

from __future__ import annotations

import codecs
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import paramiko

CHUNK = 1 << 16
KEPT_ERRORS = 1 << 16  # bytes of stderr kept: the end of it is what explains a failure
# After the process ended its last output is still on the way; a grandchild that holds the stream open must not hold us.
LINGER_SECONDS = 5.0
SETTLE_SECONDS = 0.5
NO_STATUS = -1  # paramiko's, until a status came


class Link(Protocol):
    """What a process needs to know of its connection."""

    @property
    def alive(self) -> bool: ...

    def gone(self, why: object = "") -> Exception: ...


class Process:
    """Reads stdout as lines and keeps the end of stderr, each in its own thread.

    A channel shares one window between its streams: who reads one of them only stops both after 2 MiB on the other.
    """

    def __init__(self, channel: paramiko.Channel, link: Link) -> None:
        self.pid = ""  # its number there, once it has said so
        self._channel = channel
        self._link = link
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ended = False  # the None that ends the lines was taken
        self._tail = bytearray()
        self._readers = [
            threading.Thread(target=self._read_out, daemon=True),
            threading.Thread(target=self._read_err, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def lines(self, timeout: float | None = None) -> Iterator[str]:
        """Yield stdout's lines, without their ends, until it closes or no line comes for `timeout` seconds.

        Raises:
            Unreachable: the connection was lost before the process ended.
        """
        while not self._ended:
            # The status may overtake the last of the output.
            patience = LINGER_SECONDS if timeout == 0 and self._channel.exit_status_ready() else timeout
            try:
                line = self._lines.get(timeout=patience)
            except queue.Empty:
                if not self._link.alive:
                    raise self._link.gone() from None
                return
            if line is None:
                self._ended = True
                if self._vanished():
                    raise self._link.gone()
                return
            yield line

    def rest(self) -> list[str]:
        """The lines not taken yet, of a process that has ended."""
        for reader in self._readers:
            reader.join(LINGER_SECONDS)
        return list(self.lines(timeout=0.0 if self._readers[0].is_alive() else None))

    def errors(self) -> str:
        """The end of stderr so far."""
        return bytes(self._tail).decode("utf-8", errors="replace")

    @property
    def running(self) -> bool:
        """Whether the process has neither ended nor been lost."""
        return not self._channel.exit_status_ready() and self._link.alive

    def close_stdin(self) -> None:
        """The end of the lifeline: the process reads EOF."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.shutdown_write()

    def send(self, data: bytes) -> None:
        """Write to the process's stdin.

        Raises:
            Unreachable: the connection is gone.
            BrokenPipeError: the process reads no more.
        """
        try:
            self._channel.sendall(data)
        except (OSError, EOFError, paramiko.SSHException) as error:
            if self._vanished():
                raise self._link.gone(error) from None
            raise BrokenPipeError(str(error)) from None

    def wait(self, timeout: float | None) -> int | None:
        """The exit status; None when it is still running after `timeout` seconds; -1 when a signal ended it.

        Raises:
            Unreachable: the connection was lost before the status came.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._channel.status_event.wait(0.05):
            if not self._link.alive or self._channel.closed:
                break
            if deadline is not None and time.monotonic() >= deadline:
                return None
        if self._vanished():
            raise self._link.gone()
        # When a signal ended the process, sshd says so in a message that paramiko passes over, and the status stays -1.
        return int(self._channel.exit_status)

    def _vanished(self) -> bool:
        """Whether a stream ended because the connection did. paramiko closes the channels of a dying transport a moment
        before it calls the transport dead, and a status comes a moment after the end of the output."""
        until = time.monotonic() + SETTLE_SECONDS
        while self._channel.exit_status == NO_STATUS:
            if not self._link.alive:
                return True
            if time.monotonic() >= until:
                break
            time.sleep(0.01)
        return False

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()

    def _read_out(self) -> None:
        # A character may be cut between two chunks, and what a rank prints need not be text at all.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        pending: list[str] = []
        for chunk in _chunks(self._channel.recv):
            *whole, last = decoder.decode(chunk).split("\n")
            for line in whole:
                self._lines.put("".join([*pending, line]))
                pending.clear()
            pending.append(last)
        last = "".join([*pending, decoder.decode(b"", final=True)])
        if last:
            self._lines.put(last)
        self._lines.put(None)

    def _read_err(self) -> None:
        for chunk in _chunks(self._channel.recv_stderr):
            self._tail += chunk
            del self._tail[:-KEPT_ERRORS]


def _chunks(receive: Callable[[int], bytes]) -> Iterator[bytes]:
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        while chunk := receive(CHUNK):
            yield chunk
