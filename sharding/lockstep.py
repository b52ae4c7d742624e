"""N ranks in one process: greenlets that meet at each collective, which is really reduced.

For tests of the algebra, by the hundred: no processes, no network, exact. Every rank must own its
parameters (upstream code divides some in place). Compilation is switched off, since a compiled function
would be traced by one rank and replayed by the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import greenlet
import mlx.core as mx

from sharding.trace import StandInGroup, replaced

T = TypeVar("T")


class Mismatch(RuntimeError):
    """Ranks asked for different collectives, or one ended while others waited."""


def run(ranks: int, work: Callable[[StandInGroup], T]) -> list[T]:
    """Run `work(group)` as `ranks` ranks in turns and return what each returned.

    Args:
        ranks: World size.
        work: The rank's program; `group` has `rank()` and `size()`, and `mx.distributed`'s all_sum,
            all_gather, all_max, all_min and init work between the ranks.

    Raises:
        Mismatch: The ranks do not meet at the same collective with the same shape.
    """
    hub = greenlet.getcurrent()
    groups = [StandInGroup(rank, ranks) for rank in range(ranks)]
    current = 0

    def meet(kind: str, x: mx.array) -> mx.array:
        return hub.switch((kind, x))

    def collective(kind: str) -> Callable[..., mx.array]:
        return lambda x, *_, **__: meet(kind, x)

    def init(*_: Any, **__: Any) -> StandInGroup:
        return groups[current]

    functions: dict[str, Callable[..., Any]] = {
        kind: collective(kind) for kind in ("all_sum", "all_gather", "all_max", "all_min")
    }
    threads = [greenlet.greenlet(work) for _ in range(ranks)]
    answers: list[Any] = list(groups)
    mx.disable_compile()
    try:
        with replaced(functions | {"init": init}):
            while True:
                for rank, thread in enumerate(threads):
                    current = rank
                    answers[rank] = thread.switch(answers[rank])
                ended = [thread.dead for thread in threads]
                if all(ended):
                    return answers
                if any(ended):
                    raise Mismatch(f"rank {ended.index(True)} ended while rank {ended.index(False)} waits")
                answers = _reduce(answers)
    finally:
        mx.enable_compile()


def _reduce(asked: list[tuple[str, mx.array]]) -> list[mx.array]:
    kinds = {kind for kind, _ in asked}
    arrays = [array for _, array in asked]
    if len(kinds) != 1 or len({(tuple(a.shape), a.dtype) for a in arrays}) != 1:
        raise Mismatch(
            "ranks disagree: " + ", ".join(f"{kind} {tuple(a.shape)} {a.dtype}" for kind, a in asked)
        )
    kind = kinds.pop()
    if kind == "all_gather":
        whole = mx.concatenate([a if a.ndim else a[None] for a in arrays], axis=0)
    else:
        combine = {"all_sum": mx.add, "all_max": mx.maximum, "all_min": mx.minimum}[kind]
        whole = arrays[0]
        for array in arrays[1:]:
            whole = combine(whole, array)
    return [whole] * len(arrays)
