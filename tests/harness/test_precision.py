"""In the timed type a split model may be as far from float32 as the unsharded one, and not much further."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from harness.precision import Spread, check_spread, spread
from harness.prompts import random_prompt
from harness.reference import take_reference
from tests.harness.small_models import VOCABULARY, llama, replace_call, split_llama

PROMPT = mx.array(random_prompt(VOCABULARY, 2, 40, seed=0))


def in_bfloat16() -> Any:
    model = llama()
    model.set_dtype(mx.bfloat16)
    return model


def test_a_correct_split_in_bfloat16_is_no_further_off():
    """Far beyond the float32 tolerance, as bfloat16 is, and still accepted for two and four ranks."""
    reference = take_reference(llama(), PROMPT, 6, draws=1)
    base = spread(in_bfloat16(), reference)
    assert base.rms > 10 * reference.tolerances["logits"].relative
    for ranks in (2, 4):
        split = spread(split_llama(in_bfloat16(), ranks), reference)
        assert check_spread(split, base) == []


def test_a_fault_of_the_low_type_only_is_found():
    """Sums that are kept in too few bits, as a wrong cast does, are further off than bfloat16 explains."""
    reference = take_reference(llama(), PROMPT, 6, draws=1)
    base = spread(in_bfloat16(), reference)
    model = in_bfloat16()
    for layer in model.layers:
        replace_call(layer.mlp, lambda call, x: mx.round(call(x) * 4) / 4)
    reasons = check_spread(spread(model, reference), base)
    assert "root mean square distance" in reasons[0]
    assert "more than 2.4 times as far" in reasons[0]


def test_nan_is_never_accepted():
    """A split that gives NaN is refused, and so is a baseline that does."""
    reference = take_reference(llama(), PROMPT, 2, draws=1)
    model = in_bfloat16()
    model.lm_head.weight = model.lm_head.weight * float("nan")
    broken = spread(model, reference)
    fine = Spread(0.01, 1e-4, 100)
    assert check_spread(broken, fine)
    assert check_spread(fine, broken) == [
        "the unsharded model in the timed type gives nothing to compare with"
    ]
    for bad in ((float("nan"), 0, 1), (0, -1, 1), (0, 0, 0)):
        with pytest.raises(ValueError, match="never negative, NaN or of nothing"):
            Spread(*bad)


def test_each_measure_counts_by_itself():
    """With many rows 2.1 times the distance, or the square of it in divergence, is the limit; fewer rows get more."""
    base = Spread(0.01, 1e-4, 1600)
    assert check_spread(Spread(0.0209, 4.4e-4, 1600), base) == []
    assert "root mean square" in check_spread(Spread(0.0211, 1e-4, 1600), base)[0]
    assert "KL divergence" in check_spread(Spread(0.01, 4.5e-4, 1600), base)[0]
    assert check_spread(Spread(0.029, 8e-4, 16), base) == []
    assert check_spread(Spread(1e-7, 0, 9), Spread(0, 0, 9)) == []
