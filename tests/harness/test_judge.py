"""The verdict on a job whose ranks have failed: whom it blames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import judge


def record(rank: int, returncode: int | None, ended: float, **more: Any) -> dict[str, Any]:
    """An exit record."""
    return {"rank": rank, "returncode": returncode, "ended": ended, "stopped": False, "signal": None, **more}


def say(jobdir: Path, rank: int, text: str) -> None:
    """Give a rank a log."""
    (jobdir / f"rank-{rank}").mkdir()
    (jobdir / f"rank-{rank}" / "log").write_text(text)


def test_the_rank_that_failed_first_is_blamed(tmp_path: Path) -> None:
    """Of two failures the earlier one, with what that rank said; the other is mentioned."""
    say(tmp_path, 0, "second\n")
    say(tmp_path, 1, "Traceback\nKeyError: 'layers'\n")
    ending = judge.crashed([record(0, 1, ended=2.0), record(1, 3, ended=1.0)], tmp_path)
    assert ending == judge.Ending(
        "crashed", "rank 1 exited with status 3: KeyError: 'layers' (then rank 0 failed too)"
    )


def test_a_rank_that_lost_its_peer_is_not_blamed_though_it_was_quicker_to_end(tmp_path: Path) -> None:
    """A large process takes longer to be torn down than its peer to complain."""
    say(tmp_path, 0, "RuntimeError: [ring] The connection to a peer was lost\n")
    say(tmp_path, 1, "killed\n")
    ending = judge.crashed([record(0, 1, 1.0), record(1, -9, 2.0, signal="SIGKILL")], tmp_path)
    assert ending.reason.startswith("rank 1 was killed by SIGKILL")


def test_a_rank_that_was_made_to_end_has_not_failed() -> None:
    """Its status is the supervisor's doing."""
    assert not judge.failed({**record(0, -15, 1.0), "stopped": True})
    assert not judge.failed(record(0, 0, 1.0))
    assert judge.failed(record(0, None, 1.0))
    assert judge.failed(record(0, -11, 1.0))


def test_an_ending_needs_a_known_outcome_and_one_line() -> None:
    """Six words, and a reason."""
    for outcome, reason in (("fine", "x"), ("ok", ""), ("ok", "a\nb")):
        with pytest.raises(ValueError, match=r"\S"):
            judge.Ending(outcome, reason)
