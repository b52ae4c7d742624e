"""How far one array is from another, and one model's logits from another's.

Nothing here can call two arrays close that aren't there: an empty array, another shape, NaN or an infinity
makes the distance infinite and says so in `problem`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

ROW_FLOOR = 1e-4
"""A row counts at least this fraction of the largest one, so that a row of zeros can't make a distance infinite."""

SATURATED_NATS = 1e-3
SATURATED_ROWS = 8
"""Logits are called saturated when this many consecutive rows each hold less than that entropy."""

_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Distance:
    """How far an array is from its reference.

    Attributes:
        max_abs: the largest |value - reference|.
        scale: the largest |reference|.
        relative: max_abs / scale.
        row_relative: the same for each row (the last axis: one token) by itself, the worst. Models have a few tokens
            with activations a thousand times larger than the rest; measured against those, a fault in every other
            token would be lost.
        problem: why the arrays can't be compared at all; the four numbers are then infinite.
    """

    max_abs: float
    scale: float
    relative: float
    row_relative: float
    problem: str | None = None

    def __post_init__(self) -> None:
        numbers = (self.max_abs, self.scale, self.relative, self.row_relative)
        if any(math.isnan(n) or n < 0 for n in numbers):
            raise ValueError(f"a distance is never negative or NaN: {numbers}")
        if self.problem is not None and not all(math.isinf(n) for n in numbers):
            raise ValueError("arrays that can't be compared are infinitely far apart")

    def exceeds(self, tolerance: Tolerance) -> bool:
        """Whether either way of measuring is beyond what is tolerated."""
        return not (self.relative <= tolerance.relative and self.row_relative <= tolerance.row_relative)


@dataclass(frozen=True)
class Tolerance:
    """How large a `Distance` may be: both numbers are relative, positive and finite."""

    relative: float
    row_relative: float

    def __post_init__(self) -> None:
        for value in (self.relative, self.row_relative):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"a tolerance must be positive and finite, not {value}")


def incomparable(problem: str) -> Distance:
    """The distance between arrays that can't be compared."""
    return Distance(math.inf, math.inf, math.inf, math.inf, problem)


def distance(value: mx.array, reference: mx.array) -> Distance:
    """How far `value` is from `reference`; both of any float type, compared in float32."""
    if tuple(value.shape) != tuple(reference.shape):
        return incomparable(f"shape {tuple(value.shape)} instead of {tuple(reference.shape)}")
    if value.size == 0:
        return incomparable("empty")
    a, b = value.astype(mx.float32), reference.astype(mx.float32)
    if a.ndim == 0:
        a, b = a[None], b[None]
    rows_diff = mx.abs(a - b).max(axis=-1)
    rows_scale = mx.abs(b).max(axis=-1)
    bad_value, bad_reference = mx.logical_not(mx.isfinite(a)).sum(), mx.logical_not(mx.isfinite(b)).sum()
    max_abs, scale = rows_diff.max(), rows_scale.max()
    row = (rows_diff / mx.maximum(mx.maximum(rows_scale, scale * ROW_FLOOR), _TINY)).max()
    mx.eval(bad_value, bad_reference, max_abs, scale, row)  # at once: five results, one wait
    if bad_reference.item():
        return incomparable(f"the reference holds {bad_reference.item()} values that are not finite")
    if bad_value.item():
        return incomparable(f"{bad_value.item()} of {a.size} values are not finite")
    far, size, worst_row = (float(np.array(n)) for n in (max_abs, scale, row))
    if not (math.isfinite(far) and math.isfinite(worst_row)):  # two huge finite values of opposite sign
        return incomparable("the difference overflows float32")
    return Distance(far, size, far / max(size, _TINY), worst_row)


def row_distances(value: mx.array, reference: mx.array) -> npt.NDArray[np.float64]:
    """Of each row (all axes but the last) of two comparable arrays: largest difference, scale, one over the other.

    Returns:
        Shape (rows, 3).
    """
    a, b = value.astype(mx.float32), reference.astype(mx.float32)
    diff = np.array(mx.abs(a - b).max(axis=-1), dtype=np.float64).ravel()
    scale = np.array(mx.abs(b).max(axis=-1), dtype=np.float64).ravel()
    return np.stack(
        [diff, scale, diff / np.maximum(np.maximum(scale, scale.max() * ROW_FLOOR), _TINY)], axis=1
    )


_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class LogitsComparison:
    """One model's logits beside the reference's, row by row (a row is one token's whole vocabulary).

    Attributes:
        distance: largest difference, absolute and relative.
        rms: root mean square difference over all logits.
        kl_mean, kl_max: Kullback-Leibler divergence of the reference's distribution from the other's, nats a row.
        top1_agreement: fraction of rows whose greedy token is the same. A row in which the other model's choice is
            one that the reference itself puts within twice the tolerance of its best (each of two logits may move
            by one tolerance) is a tie that rounding decides, and counts as agreeing.
        ties: rows that count as agreeing for that reason only.
        rows: how many rows were compared.
        saturated: the compared logits have next to no entropy, row after row.
        reference_saturated: the reference's have none.
    """

    distance: Distance
    rms: float
    kl_mean: float
    kl_max: float
    top1_agreement: float
    ties: int
    rows: int
    saturated: bool
    reference_saturated: bool


def compare_logits(value: mx.array, reference: mx.array, tolerance: float) -> LogitsComparison:
    """Compare logits of shape (..., vocabulary).

    Args:
        value: the logits under test.
        reference: what they should be.
        tolerance: relative to the largest reference logit; decides which greedy tokens are ties.
    """
    far = distance(value, reference)
    if far.problem is not None:
        return LogitsComparison(far, math.inf, math.inf, math.inf, 0.0, 0, 0, False, False)
    a = np.array(value.astype(mx.float32)).reshape(-1, value.shape[-1])
    b = np.array(reference.astype(mx.float32)).reshape(-1, reference.shape[-1])
    margin = 2 * tolerance * far.scale
    kl: list[float] = []
    entropy_a: list[float] = []
    entropy_b: list[float] = []
    squares = 0.0
    same = ties = 0
    for start in range(0, len(a), _ROWS_AT_ONCE):  # float64 copies of a whole vocabulary are large
        p = a[start : start + _ROWS_AT_ONCE].astype(np.float64)
        q = b[start : start + _ROWS_AT_ONCE].astype(np.float64)
        squares += float(((p - q) ** 2).sum())
        log_p, log_q = _log_softmax(p), _log_softmax(q)
        kl += [max(0.0, k) for k in (np.exp(log_q) * (log_q - log_p)).sum(-1).tolist()]
        entropy_a += (-(np.exp(log_p) * log_p).sum(-1)).tolist()
        entropy_b += (-(np.exp(log_q) * log_q).sum(-1)).tolist()
        chosen, best = p.argmax(-1), q.argmax(-1)
        gap = (
            np.take_along_axis(q, best[:, None], -1)[:, 0] - np.take_along_axis(q, chosen[:, None], -1)[:, 0]
        )
        equal = chosen == best
        tied = ~equal & (gap <= margin)
        same += int(equal.sum())
        ties += int(tied.sum())
    return LogitsComparison(
        distance=far,
        rms=math.sqrt(squares / a.size),
        kl_mean=float(np.mean(kl)),
        kl_max=max(kl),
        top1_agreement=(same + ties) / len(a),
        ties=ties,
        rows=len(a),
        saturated=is_saturated(entropy_a),
        reference_saturated=is_saturated(entropy_b),
    )


def is_saturated(entropies: list[float]) -> bool:
    """Whether enough consecutive rows have next to no entropy (nats): a symptom of garbage that reads fluently."""
    run = longest = 0
    for entropy in entropies:
        run = run + 1 if entropy < SATURATED_NATS else 0
        longest = max(longest, run)
    return longest >= min(SATURATED_ROWS, len(entropies)) > 1


def _log_softmax(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = x - x.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
