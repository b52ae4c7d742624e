"""How a job ended, judged from what its N supervisors recorded; a launcher's status is never asked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import protocol

# How a rank complains that another one is gone: a consequence, so its peers are suspected first.
_PEER_LOST = re.compile(r"connection .*(lost|closed|reset)|peer|MPI_ERR|broken pipe", re.IGNORECASE)


@dataclass(frozen=True)
class Ending:
    """The outcome of a job and its reason, one line."""

    outcome: str
    reason: str

    def __post_init__(self) -> None:
        protocol.check(
            self.outcome in protocol.OUTCOMES, f"outcome {self.outcome!r}: one of {protocol.OUTCOMES}"
        )
        protocol.check(self.reason and "\n" not in self.reason, "a reason of one line is needed")


def failed(record: Mapping[str, Any]) -> bool:
    """Whether the rank failed by itself: not at status 0, and not because it was made to end."""
    return record.get("returncode") != 0 and not record.get("stopped")


def how(record: Mapping[str, Any], log: Path) -> str:
    """One rank's failure in words: what ended it, and the last thing it said."""
    if record.get("returncode") is None:
        return f"rank {record['rank']} {record.get('reason', 'ended')}"
    ended = (
        f"was killed by {record['signal']}"
        if record.get("signal")
        else f"exited with status {record['returncode']}"
    )
    said = protocol.last_line(log)
    return f"rank {record['rank']} {ended}" + (f": {said}" if said else "")


def culprit(records: Sequence[Mapping[str, Any]], jobdir: Path) -> Mapping[str, Any]:
    """Which of several failed ranks failed first: a rank that misses its peers comes after those it misses."""

    def order(record: Mapping[str, Any]) -> tuple[bool, float]:
        said = protocol.last_line(protocol.rank_dir(jobdir, record["rank"]) / protocol.LOG)
        consequence = not record.get("signal") and bool(_PEER_LOST.search(said))
        return consequence, float(record.get("ended", 0.0))

    return min(records, key=order)


def crashed(records: Sequence[Mapping[str, Any]], jobdir: Path) -> Ending:
    """`crashed`, with the rank to blame and the number of others that failed with it."""
    first = culprit(records, jobdir)
    reason = how(first, protocol.rank_dir(jobdir, first["rank"]) / protocol.LOG)
    others = [str(record["rank"]) for record in records if record is not first]
    if others:
        reason += f" (then rank{'s' if len(others) > 1 else ''} {', '.join(others)} failed too)"
    return Ending("crashed", reason)
