"""Figures of timings: what the samples support is said, and nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import statistics
from harness.statistics import drift, ratio, summary

TIMES = st.lists(st.floats(min_value=1e-6, max_value=1e3, allow_nan=False), min_size=1, max_size=40)


def noise(n: int, centre: float = 1.0, spread: float = 0.01, seed: int = 0) -> np.ndarray:
    """Return n seeded timings around `centre`."""
    return centre * (1 + spread * np.random.default_rng(seed).standard_normal(n))


@settings(max_examples=25, deadline=None)
@given(TIMES)
def test_the_figures_lie_among_the_samples(samples):
    """Median and interval never leave the range of what was measured, and nothing is dropped."""
    found = summary(samples)
    assert found.n == len(samples)
    assert found.minimum == min(samples)
    assert found.maximum == max(samples)
    if found.interval is not None:
        low, high = found.interval
        assert found.minimum <= low <= found.median <= high <= found.maximum


@pytest.mark.parametrize("n", [1, 2, 5])
def test_too_few_samples_have_no_interval_and_say_so(n):
    """Below six samples not even their whole range is a 95 % interval of the median, so none is given."""
    found = summary(noise(n))
    assert found.interval is None
    assert f"{n} samples are too few" in found.notes[0]


def test_the_smallest_number_of_samples_is_where_the_range_covers_the_median():
    """The limit follows from the confidence and is no taste: one sample less could not cover 95 %."""
    n = statistics.FEWEST_FOR_INTERVAL
    assert 1 - 2 * 0.5**n >= statistics.CONFIDENCE > 1 - 2 * 0.5 ** (n - 1)
    assert summary(noise(n)).interval is not None


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """Of 100 intervals on independent samples, some 95 hold the true median."""
    held = 0
    for seed in range(100):
        interval = summary(noise(25, seed=seed)).interval
        assert interval is not None
        held += interval[0] <= 1.0 <= interval[1]
    assert 88 <= held <= 100


def test_the_same_samples_give_the_same_interval():
    """A report written twice shows the same figures."""
    assert summary(noise(30)) == summary(noise(30))


def test_an_outlier_moves_the_median_little_and_is_counted():
    """One step that the machine held up is reported, kept, and doesn't decide the figure."""
    calm = noise(30)
    held_up = np.append(calm, 50.0)
    found = summary(held_up)
    assert found.outliers == 1
    assert found.maximum == 50.0
    assert found.median == pytest.approx(summary(calm).median, rel=0.01)


def test_a_wide_spread_is_called_unstable():
    """Samples that scatter by a fifth carry a note; samples that scatter by a hundredth carry none."""
    assert any("unstable" in note for note in summary(noise(40, spread=0.2)).notes)
    assert summary(noise(40, spread=0.01)).notes == ()


def test_a_machine_that_slows_down_is_flagged():
    """A drift of a fifth over the run is found, with its sign; the same samples shuffled are no drift."""
    throttled = noise(40, spread=0.01) * np.linspace(1, 1.25, 40)
    found = drift(throttled)
    assert found is not None
    assert 0.1 < found < 0.25
    assert any("slower" in note for note in summary(throttled).notes)
    assert drift(throttled[::-1]) == pytest.approx(-0.15, abs=0.08)
    assert drift(np.random.default_rng(3).permutation(throttled)) is None


@pytest.mark.parametrize("samples", [noise(40), np.full(40, 0.5), noise(9) * np.linspace(1, 2, 9)])
def test_no_drift_is_claimed_without_evidence(samples):
    """Noise, constant samples and too few samples are not called a drift."""
    assert drift(samples) is None


def test_neighbouring_steps_cancel_what_slowed_both():
    """Interleaved series that drift together keep a sharp ratio, which their medians alone would blur."""
    load = np.linspace(1, 1.5, 40)
    found = ratio(noise(40, 1.10, seed=1) * load, noise(40, 1.0, seed=2) * load, interleaved=True)
    assert found.paired
    assert found.interval is not None
    assert found.interval[0] > 1.08
    assert found.interval[1] < 1.12
    apart = ratio(noise(40, 1.10, seed=1) * load, noise(40, 1.0, seed=2) * load, interleaved=False)
    assert apart.interval is not None
    assert apart.interval[1] - apart.interval[0] > 3 * (found.interval[1] - found.interval[0])


def test_equal_series_are_not_told_apart():
    """Two series of the same model are not separable; one that is a tenth slower is, and too few samples can't say."""
    assert ratio(noise(30, seed=1), noise(30, seed=2), interleaved=True).separable is False
    assert ratio(noise(30, 1.1, seed=1), noise(30, seed=2), interleaved=True).separable is True
    assert ratio(noise(4, 1.1), noise(4), interleaved=True).separable is None


def test_series_of_unequal_length_are_compared_over_what_they_share():
    """A stream that was cut off still compares; its sample count is the shorter one."""
    assert ratio(noise(30), noise(20), interleaved=True).n == 20
    assert ratio(noise(30), noise(20), interleaved=False).value == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("bad", [[], [0.0], [-1.0], [math.nan], [1.0, math.inf], [[1.0]]])
def test_what_is_no_timing_is_refused(bad):
    """Nothing empty, zero, negative or non-finite becomes a figure."""
    for call in (summary, drift, lambda values: ratio(values, [1.0], interleaved=True)):
        with pytest.raises(ValueError, match=r"no samples|positive finite"):
            call(bad)
