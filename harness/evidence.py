"""What a job left in its folder: events that did not come while it ran, and what its ranks printed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import protocol


def unseen(folder: Path, seen: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """Events in the collected files beyond those that came while the job ran; the files are the evidence."""
    for path in sorted(folder.glob(f"rank-*/{protocol.EVENTS}")):
        rank = int(path.parent.name.removeprefix("rank-"))
        found = []
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):  # cut off in the middle
                found.append(json.loads(line))
        for event in [event for event in found if isinstance(event, dict)][seen.get(rank, 0) :]:
            yield {**event, "rank": rank}


def append_logs(folder: Path) -> None:
    """Add what the ranks of a job printed to the run's own `rank-<r>.log`, where all jobs follow each other."""
    for log in sorted(folder.glob("rank-*/log")):
        with log.open("rb") as source, (folder.parent / f"{log.parent.name}.log").open("ab") as target:
            target.write(f"== {folder.name}\n".encode())
            shutil.copyfileobj(source, target)
