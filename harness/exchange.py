"""What the ranks of a job tell each other besides the model's own collectives: who they are, and whether all agree."""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx

from harness.rank import RankContext
from sharding.trace import StandInGroup


class WrongJobError(RuntimeError):
    """The processes that answered are not the ranks of this job."""


def connect(context: RankContext) -> Any:
    """The group of this job's ranks, after one exchange that proves it.

    Each rank hands in its number and a part of the job's nonce; N different ranks with one nonce must come back.
    Without that, a job that reached a port of another one, or a rank that never found its peers and counts itself
    as the whole world, would give plausible numbers.

    Raises:
        WrongJobError: They are not.
    """
    if context.ranks == 1:
        return StandInGroup(0, 1)
    group = mx.distributed.init(strict=True, backend=context.backend)
    if (group.rank(), group.size()) != (context.rank, context.ranks):
        raise WrongJobError(
            f"the {context.backend} backend says rank {group.rank()} of {group.size()}, "
            f"the job says {context.rank} of {context.ranks}"
        )
    mine = [context.rank, _number(context.nonce)]
    seen = mx.distributed.all_gather(mx.array([mine], dtype=mx.int32), group=group).tolist()
    if seen != [[rank, mine[1]] for rank in range(context.ranks)]:
        raise WrongJobError(f"the ranks that answered are not {context.ranks} ranks of one job: {seen}")
    return group


def any_rank(group: Any, flag: bool) -> bool:
    """Whether the flag is set on any rank; all ranks get the same answer."""
    if group.size() == 1:
        return flag
    return bool(mx.distributed.all_sum(mx.array(int(flag)), group=group).item())


def equal(group: Any, text: str) -> bool:
    """Whether all ranks hold the same text."""
    if group.size() == 1:
        return True
    numbers = mx.distributed.all_gather(mx.array([_number(text)], dtype=mx.int32), group=group)
    return bool(mx.all(numbers == numbers[0]).item())


def barrier(group: Any) -> None:
    """Wait for all ranks."""
    any_rank(group, False)


def _number(text: str) -> int:
    """31 bits of a text's digest."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
