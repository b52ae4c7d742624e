"""How far the unsharded model's own rounding moves it: the tolerances of a reference.

A correct split adds the same numbers in another order. Two things follow from that:

1. Each block's result carries other rounding errors. A sum of K float32 terms, taken one after the other, is off by
   about eps * sqrt(K) / 5 of its size (each partial sum, growing as sqrt(k), is rounded once), whatever the order.
   `reordering(K)` = eps * (8 + sqrt(K)) allows five times that, and a few roundings more. That is a worst case: a BLAS
   that adds in several lanes, or a GPU, stays far below.
2. What the block does with a change of that size depends on the model: a smooth block passes it on, one that selects
   (top-k) or rounds (fp8) can jump. So the reference is run again with every element of every block's input moved by
   one rounding, up or down at random, and with what it passes on moved likewise: how far do outputs, inputs of later
   blocks and final logits move? The worst row of the worst draw counts, `FACTOR` times: a correct split moves by up to
   sqrt(K) / 5 such roundings rather than one, and the worst of few draws isn't the worst possible. (One draw of a
   prompt already has hundreds of rows; more of them hardly change the result, and each costs three runs.)

A tolerance is the sum of both. Correct splits of small models (llama, Qwen3 MoE, DeepSeek V4, 2 and 4 ranks), and of
SmolLM2's real 4-bit weights (3 ranks), are at 3 to 12 % of theirs, which are 1e-5 to 5e-5; the faults of real sharding
code move a block by 1e-3 and more.

A block that selects or rounds jumps at few tokens, where two experts tie or a value lies between two steps, and is
smooth at all others. The worst row would then make the check blind to faults at every token. So rows that jump in a
draw are counted apart: the smooth rest makes the tolerance, and `Jumps` says how many rows of that block may be beyond
it (a split may jump at other tokens, and more often) and by how much. Where many rows jump, jumping is what the block
does, and then the worst row counts.

End to end nothing is forced, and a tie that a split flips changes everything after it. There the reference runs freely
with every block's output moved by `FREE_ULPS` roundings, several times what a correct split does, each draw once as
drawn and once with all signs turned: what one of the two doesn't flip, the other does. Then only a small factor remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from harness.distance import Distance, Tolerance, distance
from harness.passes import run_passes
from harness.taps import (
    Block,
    Disturber,
    Forcer,
    Handler,
    Record,
    Rounding,
    Visit,
    find_blocks,
    widest_reduction,
)

FACTOR = 16
FREE_FACTOR = 4
FREE_ULPS = 16
DRAWS = 1

JUMP = 32
"""A row jumps if it moves this many times further than the block's median row."""

JUMPS_SHARE = 1 / (2 * FACTOR)
"""If more of a block's rows jump, then a split, which disturbs `FACTOR` times as much, may make any row jump."""

_EPS = 2.0**-23
_TINY = float(np.finfo(np.float32).tiny)


class BrokenReferenceError(ValueError):
    """The unsharded model itself gives nothing to compare with (NaN, infinities)."""


def reordering(terms: int) -> float:
    """How far, relative to its size, a float32 sum of so many terms may move when they are added in another order."""
    return _EPS * (8 + math.sqrt(terms))


@dataclass(frozen=True)
class Jumps:
    """What a block whose rows jump now and then may do beyond its tolerance.

    Attributes:
        rows: at most so many rows of the block, over all passes,
        limit: each by no more than this, relative to the row.
    """

    rows: int
    limit: float

    def __post_init__(self) -> None:
        if not (self.rows >= 1 and 0 < self.limit < math.inf):
            raise ValueError(f"jumps of {self.rows} rows by {self.limit}")


@dataclass(frozen=True)
class Noise:
    """What was measured.

    Attributes:
        tolerances: by `"<block> input"` and `"<block> output"`, `"head"` and `"logits"`.
        jumps: of the blocks that have some.
    """

    tolerances: Mapping[str, Tolerance]
    jumps: Mapping[Block, Jumps]


def measure_noise(
    model: nn.Module,
    prompt: mx.array,
    teacher: mx.array,
    prefill_step: int,
    logits: Sequence[mx.array],
    positions: Sequence[tuple[int, ...]],
    records: Mapping[Visit, Record],
    draws: int,
    seed: int,
    progress: Callable[[str], None],
) -> Noise:
    """Disturb the unsharded model, three runs a draw. Arguments as in `harness.reference.take_reference`.

    Raises:
        BrokenReferenceError: it moves to something that isn't finite.
    """
    between, head, end = _Worst(), _Worst(), _Worst()
    blocks = dict.fromkeys(visit.block for visit in records)
    rows: dict[Block, list[npt.NDArray[np.float64]]] = {block: [] for block in blocks}
    recorded = {visit.call for visit in records}
    run = (model, prompt, teacher, prefill_step, logits, positions)
    for draw in range(draws):
        progress(f"noise {draw + 1} of {draws}")
        # Every other draw is the one before with all signs turned: a tie falls the other way in one of them.
        rounding = Rounding(seed * 1000 + draw // 2 * 2, -1 if draw % 2 else 1)
        forcer = Forcer(records, watch=rows, jitter=rounding)
        head.add("head", *_moved(*run, forcer, recorded))
        for d in forcer.distances:
            between.add(f"{d.visit.block} {d.what}", d.distance)
            if d.rows is not None:
                rows[d.visit.block].append(d.rows)
        for sign in (1, -1):
            disturber = Disturber(Rounding(seed * 1000 + 2 * draw + 1, sign * FREE_ULPS))
            end.add("logits", *_moved(*run, disturber))

    # An attention block adds up as many values as there are tokens.
    widest = {b: max(widest_reduction(m), prompt.shape[1]) for b, m in find_blocks(model).items()}
    width = max((r.x.shape[-1] for r in records.values()), default=1)
    tolerances = {name: between.tolerance(name, FACTOR, width) for name in between.names}
    jumps: dict[Block, Jumps] = {}
    for block, moved in rows.items():
        smooth, jumping = separate_jumps(moved)
        worst = _Worst()
        worst.add_numbers("output", *smooth)
        tolerances[f"{block} output"] = worst.tolerance("output", FACTOR, widest[block])
        if len(jumping):
            allowed = max(2, math.ceil(FACTOR * len(jumping) / draws))
            jumps[block] = Jumps(allowed, FREE_FACTOR * float(jumping.max()))
    tolerances["logits"] = end.tolerance("logits", FREE_FACTOR, max(widest.values(), default=width))
    # Nothing recorded, nothing to force: then the head has no pass of its own and is judged with the end.
    tolerances["head"] = head.tolerance("head", FACTOR, width) if records else tolerances["logits"]
    return Noise(tolerances, jumps)


def end_tolerance(
    model: nn.Module,
    prompt: mx.array,
    teacher: mx.array,
    prefill_step: int,
    logits: Sequence[mx.array],
    positions: Sequence[tuple[int, ...]],
    *,
    seed: int = 0,
) -> Tolerance:
    """How far the free-running logits of this very run may be off: two disturbed runs of the whole model.

    More tokens mean more chances of a tie between experts: a tolerance that was measured on a short prompt can be too
    tight for a long one or a large batch.
    """
    end = _Worst()
    for sign in (1, -1):
        disturber = Disturber(Rounding(seed * 1000 + 999, sign * FREE_ULPS))
        end.add("logits", *_moved(model, prompt, teacher, prefill_step, logits, positions, disturber))
    widest = max(map(widest_reduction, find_blocks(model).values()), default=1)
    return end.tolerance("logits", FREE_FACTOR, max(widest, prompt.shape[1]))


def separate_jumps(
    visits: Sequence[npt.NDArray[np.float64]],
) -> tuple[tuple[float, float], npt.NDArray[np.float64]]:
    """Tell the rows of a block that jump from the smooth rest.

    Args:
        visits: for each visit, of each row how far it moved: absolute, its scale, relative (`row_distances`).

    Returns:
        How far the smooth rows moved, relative to the visit's largest row and to each one's own, at worst; and how far
        each jumping one did, relative to its own. None jump if so many do that jumping is the block's way.
    """
    moved = np.concatenate([rows[:, 2] for rows in visits])
    limit = JUMP * max(float(np.median(moved)), _EPS)
    if (moved > limit).mean() > JUMPS_SHARE:
        limit = math.inf
    smooth = [largest_smooth(rows, limit) for rows in visits]
    return (max(s[0] for s in smooth), max(s[1] for s in smooth)), moved[moved > limit]


def largest_smooth(rows: npt.NDArray[np.float64], limit: float) -> tuple[float, float]:
    """How far the rows within a limit are off at most: relative to the visit's largest row, and to their own."""
    kept = rows[rows[:, 2] <= limit]
    if not len(kept):
        return 0.0, 0.0
    return float(kept[:, 0].max() / max(rows[:, 1].max(), _TINY)), float(kept[:, 2].max())


def _moved(
    model: nn.Module,
    prompt: mx.array,
    teacher: mx.array,
    prefill_step: int,
    logits: Sequence[mx.array],
    positions: Sequence[tuple[int, ...]],
    handler: Handler,
    calls: Container[int] | None = None,
) -> list[Distance]:
    """How far each pass's logits are from the given ones when the model runs under a handler."""
    found: list[Distance] = []

    def see(call: int, value: mx.array) -> None:
        if calls is None or call in calls:
            found.append(distance(value[:, mx.array(positions[call])], logits[call]))

    run_passes(model, prompt, teacher, prefill_step, see, handler)
    return found


class _Worst:
    """The worst distance seen under each name."""

    def __init__(self) -> None:
        self._worst: dict[str, tuple[float, float]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._worst)

    def add(self, name: str, *distances: Distance) -> None:
        for d in distances:
            if d.problem is not None:
                raise BrokenReferenceError(
                    f"the unsharded model, moved by one rounding: {name} gives {d.problem}"
                )
            self.add_numbers(name, d.relative, d.row_relative)

    def add_numbers(self, name: str, relative: float, row: float) -> None:
        before = self._worst.get(name, (0.0, 0.0))
        self._worst[name] = (max(relative, before[0]), max(row, before[1]))

    def tolerance(self, name: str, factor: float, terms: int) -> Tolerance:
        relative, row = self._worst.get(name, (0.0, 0.0))
        return Tolerance(factor * relative + reordering(terms), factor * row + reordering(terms))
