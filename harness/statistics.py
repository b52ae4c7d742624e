"""What a list of timings supports, and no more.

The median is the figure shown, because a step that a busy machine held up says nothing about the model. Its
interval is a percentile bootstrap. Samples of one launch are not independent of each other (one launch differs
from the next by more than its own interval), so an interval here speaks about that launch only; comparing two
versions of the code takes several launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Samples = Sequence[float] | np.ndarray

CONFIDENCE = 0.95
# The widest interval that n samples can give for a median, from the smallest to the largest, covers it with a chance
# of 1 - 2 * 0.5**n. Below six samples that is less than 95 %, so no honest 95 % interval exists.
FEWEST_FOR_INTERVAL = 6
RESAMPLES = 2000
# Median absolute deviation to standard deviation, for normal data.
_MAD_SCALE = 1.4826
_OUTLIER_DISTANCE = 5.0
_SPREAD_LIMIT = 0.10
_DRIFT_LIMIT = 0.05
_DRIFT_P = 0.01
_FEWEST_FOR_DRIFT = 10


@dataclass(frozen=True)
class Summary:
    """A list of timings in figures: seconds throughout, `interval` None where the samples are too few for one."""

    n: int
    median: float
    interval: tuple[float, float] | None
    mad: float
    minimum: float
    maximum: float
    outliers: int
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.n < 1 or not self.minimum <= self.median <= self.maximum:
            raise ValueError(f"not a summary of samples: {self}")

    @property
    def relative_spread(self) -> float:
        """The standard deviation that the MAD stands for, as a share of the median."""
        return _MAD_SCALE * self.mad / self.median


@dataclass(frozen=True)
class Ratio:
    """How long `a` takes as a share of `b` (below one: `a` is faster)."""

    value: float
    interval: tuple[float, float] | None
    n: int
    paired: bool
    notes: tuple[str, ...] = ()

    @property
    def separable(self) -> bool | None:
        """Whether the interval leaves out one; None when there is no interval to tell by."""
        if self.interval is None:
            return None
        return not self.interval[0] <= 1.0 <= self.interval[1]


def summary(samples: Samples, confidence: float = CONFIDENCE) -> Summary:
    """Summarise timings in seconds, in the order in which they were taken.

    Nothing is dropped: outliers are counted, a wide spread and a drift are said in `notes`.

    Raises:
        ValueError: no samples, or one that is not a positive finite number.
    """
    return _summary(tuple(_checked(samples).tolist()), confidence)


# A report asks for the same figures several times, and a bootstrap costs a hundredth of a second.
@functools.lru_cache(maxsize=1024)
def _summary(samples: tuple[float, ...], confidence: float) -> Summary:
    values = np.asarray(samples)
    median = float(np.median(values))
    mad = float(np.median(np.abs(values - median)))
    outliers = int(np.sum(np.abs(values - median) > _OUTLIER_DISTANCE * _MAD_SCALE * mad)) if mad else 0
    interval = _bootstrap((values,), _median, confidence)
    notes = []
    if interval is None:
        notes.append(f"{len(values)} samples are too few for a {confidence:.0%} interval")
    if _MAD_SCALE * mad / median > _SPREAD_LIMIT:
        notes.append(f"unstable: the samples spread by {_MAD_SCALE * mad / median:.0%} of their median")
    change = drift(values.tolist())
    if change is not None:
        notes.append(
            f"drifting: {'slower' if change > 0 else 'faster'} by {abs(change):.0%} from first to last third"
        )
    return Summary(
        n=len(values),
        median=median,
        interval=interval,
        mad=mad,
        minimum=float(values.min()),
        maximum=float(values.max()),
        outliers=outliers,
        notes=tuple(notes),
    )


def ratio(a: Samples, b: Samples, *, interleaved: bool, confidence: float = CONFIDENCE) -> Ratio:
    """Compare two series of timings in seconds.

    Args:
        interleaved: the i-th step of one series was taken beside the i-th of the other. The ratio is then the median
            of the ratios of such neighbours, which cancels whatever slowed both; where the lengths differ the rest
            is left out. Otherwise it is the ratio of the medians, with the two resampled independently.

    Raises:
        ValueError: a series is empty or holds something that is not a positive finite number.
    """
    return _ratio(tuple(_checked(a).tolist()), tuple(_checked(b).tolist()), interleaved, confidence)


@functools.lru_cache(maxsize=1024)
def _ratio(a: tuple[float, ...], b: tuple[float, ...], interleaved: bool, confidence: float) -> Ratio:
    first, second = np.asarray(a), np.asarray(b)
    fewest = min(len(first), len(second))
    if interleaved:
        first, second = first[:fewest], second[:fewest]
        shares = first / second
        value, interval = float(np.median(shares)), _bootstrap((shares,), _median, confidence)
    else:
        value = float(np.median(first) / np.median(second))
        interval = _bootstrap((first, second), _ratio_of_medians, confidence)
    notes = (f"{fewest} samples are too few for a {confidence:.0%} interval",) if interval is None else ()
    return Ratio(value=value, interval=interval, n=fewest, paired=interleaved, notes=notes)


def drift(samples: Samples) -> float | None:
    """Return by what share the last third of `samples` is slower than the first, or None when they don't drift.

    A drift needs a monotonic trend (Kendall's rank correlation, p < 0.01) and a change above five percent: a machine
    that throttles as it warms up shows both, scattered samples show neither.
    """
    values = _checked(samples)
    third = len(values) // 3
    if len(values) < _FEWEST_FOR_DRIFT or np.all(values == values[0]):
        return None
    from scipy.stats import kendalltau

    change = float(np.median(values[-third:]) / np.median(values[:third]) - 1)
    trend = kendalltau(np.arange(len(values)), values)
    if abs(change) <= _DRIFT_LIMIT or not trend.pvalue < _DRIFT_P:
        return None
    return change


def _checked(samples: Samples) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError("no samples")
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError("a timing must be a positive finite number of seconds")
    return values


def _median(values: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.asarray(np.median(values, axis=axis))


def _ratio_of_medians(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.asarray(np.median(a, axis=axis) / np.median(b, axis=axis))


def _bootstrap(
    data: tuple[np.ndarray, ...], statistic: object, confidence: float
) -> tuple[float, float] | None:
    """Return the percentile bootstrap interval of `statistic`, the same for the same samples, or None for too few."""
    if min(len(values) for values in data) < FEWEST_FOR_INTERVAL:
        return None
    from scipy.stats import bootstrap

    found = bootstrap(
        data,
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=confidence,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)
