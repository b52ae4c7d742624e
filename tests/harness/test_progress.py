"""What a reader is told while a run goes on, and what is kept from them."""

from __future__ import annotations

from typing import Any

import pytest

from harness import progress
from harness.progress import describe


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"event": "reference", "model": "m"}, "m: one rank, the whole model"),
        ({"event": "group", "model": "m", "ranks": 3, "backend": "ring"}, "m: 3 ranks over ring"),
        (
            {"event": "begin", "phase": "load", "strategies": ["a"], "shape": None, "rank": 0},
            "load a",
        ),
        (
            {"event": "begin", "phase": "time", "strategies": ["a", "b"], "shape": [4, 16], "rank": 0},
            "time a, b at batch 4, context 16",
        ),
        ({"event": "begin", "phase": "load", "strategies": ["a"], "shape": None, "rank": 1}, None),
        ({"event": "begin", "phase": "reference", "strategies": [], "shape": None, "rank": 0}, None),
        ({"event": "progress", "what": "noise 1 of 2", "rank": 0}, "noise 1 of 2"),
        ({"event": "progress", "steps": 12, "rank": 0}, None),
        ({"event": "timed", "strategy": "a", "rank": 0}, None),
        ({"event": "record", "outcome": "ok"}, None),
        ({}, None),
    ],
)
def test_an_event_is_a_phrase_or_nothing(event: dict[str, Any], said: str | None) -> None:
    """One rank speaks for all, in one short line; what a reader can't use is left out."""
    assert describe(event) == said


def test_without_a_terminal_lines_count_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    """In a log each line says how many of the cases are settled; stdout stays clean."""
    with progress.display(2, "run x") as shown:
        shown({"event": "group", "model": "m", "ranks": 2, "backend": "mpi"})
        shown({"event": "record", "outcome": "ok"})
        shown({"event": "progress", "steps": 3, "rank": 0})
        shown({"event": "progress", "what": "more", "rank": 0})
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "[0/2] m: 2 ranks over mpi\n[1/2] more\n"


def test_quiet_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """With --json nothing is shown at all."""
    with progress.display(1, "run x", quiet=True) as shown:
        shown({"event": "group", "model": "m", "ranks": 2, "backend": "mpi"})
        shown({"event": "record", "outcome": "ok"})
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the bar is on stderr, names the run, and is gone at the end."""
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.display(1, "run x") as shown:
        shown({"event": "begin", "phase": "load", "strategies": ["[bold]a"], "shape": None, "rank": 0})
        shown({"event": "record", "outcome": "ok"})
    assert capsys.readouterr().out == ""
