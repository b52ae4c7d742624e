"""Distances can't call anything close that isn't."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.distance import Distance, Tolerance, compare_logits, distance, is_saturated, row_distances

LOOSE = Tolerance(1e9, 1e9)


@pytest.mark.parametrize(
    ("value", "reference", "problem"),
    [
        ([[1.0, math.nan]], [[1.0, 2.0]], "1 of 2 values are not finite"),
        ([[1.0, math.inf]], [[1.0, 2.0]], "1 of 2 values are not finite"),
        ([[1.0, math.inf]], [[1.0, math.inf]], "the reference holds 1 values"),
        ([[math.nan, 1.0]], [[math.nan, 1.0]], "the reference holds 1 values"),
        ([[1.0]], [[1.0, 1.0]], "shape (1, 1) instead of (1, 2)"),
        ([[3e38]], [[-3e38]], "overflows"),
    ],
)
def test_what_cannot_be_compared_is_infinitely_far(value, reference, problem):
    """NaN, infinities, other shapes and overflows exceed any tolerance, and are said to be what they are."""
    far = distance(mx.array(value), mx.array(reference))
    assert far.exceeds(LOOSE)
    assert problem in (far.problem or "")
    compared = compare_logits(mx.array(value), mx.array(reference), 1.0)
    assert compared.distance.exceeds(LOOSE)
    assert compared.top1_agreement == 0


def test_nothing_is_not_equal_to_nothing():
    """Two empty arrays are not close: an empty comparison must not pass."""
    assert distance(mx.zeros((0, 4)), mx.zeros((0, 4))).exceeds(LOOSE)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 40), st.floats(1e-6, 10))
def test_distances_are_what_numpy_says(seed, rows, width, size):
    """Absolute, relative and row-wise distance agree with their definitions."""
    rng = np.random.default_rng(seed)
    reference = rng.normal(size=(rows, width)).astype(np.float32)
    value = (reference + size * rng.normal(size=reference.shape)).astype(np.float32)
    far = distance(mx.array(value), mx.array(reference))
    diff = np.abs(value - reference)
    scale = np.abs(reference).max(-1)
    assert far.max_abs == pytest.approx(diff.max())
    assert far.relative == pytest.approx(diff.max() / scale.max())
    assert far.row_relative == pytest.approx(
        (diff.max(-1) / np.maximum(scale, scale.max() * 1e-4)).max(), rel=1e-5
    )


def test_a_huge_token_does_not_hide_a_fault_in_the_others():
    """Beside a token a thousand times larger, an error of one percent in another one still counts as that."""
    reference = mx.concatenate([mx.full((1, 8), 1000.0), mx.ones((1, 8))])
    far = distance(mx.concatenate([reference[:1], reference[1:] * 1.01]), reference)
    assert far.relative < 1.1e-5
    assert far.row_relative == pytest.approx(0.01, rel=1e-3)
    assert far.exceeds(Tolerance(1e-3, 1e-3))


def test_rows_are_told_apart():
    """Each row's largest difference, its scale and their ratio, in the order of the array."""
    reference = mx.array([[[1.0, 2.0], [4.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]]])
    value = reference + mx.array([[[0.0, 0.5], [0.0, 0.0]], [[0.0, 0.0], [0.1, 0.0]]])
    expected = [[0.5, 2, 0.25], [0, 4, 0], [0, 0, 0], [0.1, 1, 0.1]]
    assert row_distances(value, reference) == pytest.approx(np.array(expected), rel=1e-5)


def test_zeros_are_equal_to_zeros_only():
    """A reference of zeros gives no division by zero, and a value beside it is far off."""
    assert not distance(mx.zeros((2, 3)), mx.zeros((2, 3))).exceeds(Tolerance(1e-6, 1e-6))
    assert distance(mx.full((2, 3), 1e-3), mx.zeros((2, 3))).exceeds(LOOSE)


def test_types_are_compared_as_numbers():
    """bfloat16 beside float32 is compared in float32, not rounded first."""
    far = distance(mx.array([[1.0]], dtype=mx.bfloat16), mx.array([[1.001]]))
    assert far.max_abs == pytest.approx(0.001, rel=1e-3)


def test_values_in_a_bad_state_cannot_be_made():
    """Distances and tolerances refuse NaN, negative and contradictory numbers."""
    with pytest.raises(ValueError, match="never negative or NaN"):
        Distance(math.nan, 1, 1, 1)
    with pytest.raises(ValueError, match="infinitely far"):
        Distance(0, 1, 0, 0, "NaN")
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            Tolerance(bad, 1)


def test_divergence_of_distributions_is_exact():
    """KL divergence is that of the reference from the other, in nats, and zero for equal logits up to a shift."""
    q, p = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    compared = compare_logits(mx.array(np.log(p)[None]), mx.array(np.log(q)[None]), 1e-6)
    assert compared.kl_mean == pytest.approx((q * np.log(q / p)).sum(), rel=1e-5)
    shifted = mx.array([[1.0, 2.0, 3.0]])
    assert compare_logits(shifted + 5, shifted, 1e-6).kl_max < 1e-12
    assert compare_logits(shifted + 5, shifted, 1e-6).rms == pytest.approx(5)


def test_a_tie_is_no_disagreement_and_a_clear_choice_is():
    """Another greedy token counts only where the reference puts it further behind than rounding reaches."""
    reference = mx.array([[1.0, 1.0 - 1e-6, 0.0], [1.0, 0.5, 0.0]])
    swapped = mx.array([[1.0 - 1e-6, 1.0, 0.0], [0.5, 1.0, 0.0]])
    compared = compare_logits(swapped, reference, 1e-5)
    assert (compared.ties, compared.rows) == (1, 2)
    assert compared.top1_agreement == 0.5


def test_saturated_logits_are_noticed():
    """Row after row without entropy is an alarm; one sure token, or ordinary logits, are none."""
    sure = mx.zeros((1, 12, 5)).at[..., 0].add(100.0)
    plain = mx.random.normal((1, 12, 5), key=mx.random.key(0))
    compared = compare_logits(sure, plain, 1e-6)
    assert compared.saturated
    assert not compared.reference_saturated
    assert not is_saturated([0.0])
    assert not is_saturated([0.0] * 7 + [1.0] + [0.0] * 7)
    assert is_saturated([1.0] + [0.0] * 8)
