"""Following a rank's events."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.tail import CHUNK, EventTail, Outlet


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """The event file of rank 2."""
    (tmp_path / "rank-2").mkdir()
    return tmp_path / "rank-2" / "events.jsonl"


def test_only_whole_lines_are_forwarded_and_each_once(events: Path) -> None:
    """Half a line waits for its other half; its growth counts as progress all the same."""
    tail = EventTail(events.parent.parent, 2)
    assert not tail.grew()
    assert tail.lines() == []
    events.write_text('{"event": "a"}\n{"event": ')
    assert tail.grew()
    assert [json.loads(line) for line in tail.lines()] == [{"rank": 2, "event": "a"}]
    assert not tail.grew()
    assert tail.lines() == []
    with events.open("a") as file:
        file.write('"b", "rank": 9}\n')
    assert tail.grew()
    assert [json.loads(line) for line in tail.lines()] == [{"rank": 2, "event": "b"}]


def test_a_line_longer_than_a_chunk_comes_whole(events: Path) -> None:
    """However long an event is, it is one line."""
    events.write_text(json.dumps({"text": "x" * (3 * CHUNK)}) + '\n{"n": 1}\n')
    tail = EventTail(events.parent.parent, 2)
    lines = tail.lines() + tail.lines()
    assert [len(json.loads(line).get("text", "")) for line in lines] == [3 * CHUNK, 0]


def test_what_is_no_object_is_counted_and_left_out(events: Path) -> None:
    """Garbage in one line spoils no other."""
    events.write_bytes(b'\xff\n[1]\n\n{"n": 1}\n{"torn": ')
    tail = EventTail(events.parent.parent, 2)
    assert [json.loads(line) for line in tail.lines()] == [{"rank": 2, "n": 1}]
    assert tail.unreadable == 3


def test_a_full_pipe_is_not_waited_for_and_a_closed_one_is_noticed() -> None:
    """Writing returns at once; what did not fit goes out later, in order; a reader that left is known."""
    reader, writer = os.pipe()
    outlet = Outlet(writer)
    line = b"x" * 99_999 + b"\n"
    outlet.put([line] * 20)
    assert outlet.waiting()
    assert outlet.full()
    received = b""
    while len(received) < 20 * len(line):
        received += os.read(reader, 1 << 20)
        outlet.put([])
    assert received == line * 20
    assert not outlet.waiting()
    os.close(reader)
    outlet.put([line])
    assert outlet.gone
    assert not outlet.waiting()
    os.close(writer)
