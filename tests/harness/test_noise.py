"""Tolerances are measured on the model: tight where it is smooth, wide where it jumps, and blind to ties only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from harness.equivalence import verify
from harness.noise import Jumps, end_tolerance, reordering, separate_jumps
from harness.prompts import random_prompt
from harness.reference import Reference, take_reference
from harness.taps import Block, Rounding, Visit
from tests.harness.small_models import VOCABULARY, SplitLinear, deepseek_v4, llama, replace_call, split_llama

PROMPT = mx.array(random_prompt(VOCABULARY, 2, 19, seed=0))


def test_a_smooth_models_tolerance_is_far_below_any_real_fault():
    """Faults of real sharding code move a block by a thousandth and more; the room left is a tenth of that at most."""
    for model in (llama(), deepseek_v4()):
        tolerances = take_reference(model, PROMPT, 2).tolerances
        assert all(t.relative < 1e-4 and t.row_relative < 1e-4 for t in tolerances.values())


def test_tolerances_differ_by_model_and_by_block():
    """A block that amplifies is given more room than its neighbours: the tolerance is measured, not a constant."""
    model: Any = llama()

    def amplify(call: Callable[..., Any], x: mx.array) -> mx.array:
        y: mx.array = call(x)
        return y + mx.sin(y * 1e4)

    replace_call(model.layers[1].mlp, amplify)
    taken, plain = take_reference(model, PROMPT, 2), take_reference(llama(), PROMPT, 2)
    calm = taken.tolerance(Block(0, "mlp"), "output").relative
    assert taken.tolerance(Block(1, "mlp"), "output").relative > 100 * calm
    assert taken.tolerances["logits"].relative > 10 * plain.tolerances["logits"].relative


MANY = mx.array(random_prompt(VOCABULARY, 4, 40, seed=1))


def rounding(step: float, ranks: int = 1, scale: float = 1.0) -> Any:
    """A llama that rounds inside its feed-forward blocks, after a sum that ranks share."""
    model: Any = llama()
    for layer in model.layers:
        layer.mlp.up_proj = SplitLinear(layer.mlp.up_proj, ranks)
        replace_call(layer.mlp.down_proj, lambda call, x, s=step, by=scale: call(mx.round(x / s) * s) * by)
    return model


@pytest.mark.parametrize("step", [2e-3, 1e-4], ids=["seldom", "often"])
def test_a_block_that_rounds_gets_room_for_it(step):
    """Rounding inside a block makes rows jump, others in a split than in the reference: that is ok, a fault is not."""
    reference = take_reference(rounding(step), MANY, 4)
    assert reference.tolerance(Block(0, "self_attn"), "output").row_relative < 1e-4
    for ranks in (2, 4, 8):
        report = verify(rounding(step, ranks), reference)
        assert report.outcome == "ok", report.reasons
    report = verify(rounding(step, 2, 1.002), reference)
    assert (report.outcome, report.first_divergence) == ("wrong", {"layer": 0, "module": "mlp"})


def with_tie(scale: float = 1.0) -> Any:
    """A llama whose second feed-forward block jumps for tokens above a threshold that one token exactly meets."""
    plain = take_reference(llama(), PROMPT, 1)
    threshold = plain.records[Visit(0, Block(1, "mlp"), 0)].x[1, 7, 0]
    mx.eval(threshold)
    model: Any = llama()

    def jump(call: Callable[..., Any], x: mx.array) -> mx.array:
        y: mx.array = call(x)
        return y * scale + mx.where(x[..., :1] >= threshold, 0.5, 0.0)

    replace_call(model.layers[1].mlp, jump)
    return model


@pytest.fixture(scope="module")
def tied() -> Reference:
    return take_reference(with_tie(), PROMPT, 2, draws=2)


def test_a_tie_does_not_make_its_block_blind(tied):
    """One row that jumps by a half leaves its block's tolerance as tight as its neighbours', and a fault is found."""
    assert list(tied.jumps) == [Block(1, "mlp")]
    assert 0.1 < tied.jumps[Block(1, "mlp")].limit < 10
    assert tied.tolerance(Block(1, "mlp"), "output").row_relative < 1e-4
    assert verify(split_llama(with_tie(), 2), tied).outcome == "ok"
    report = verify(with_tie(1.002), tied)
    assert (report.outcome, report.first_divergence) == ("wrong", {"layer": 1, "module": "mlp"})


def test_a_tie_that_falls_the_other_way_is_ok_and_noted(tied):
    """A split on the other side of the tie differs at that token, as the reference itself does, and is right."""
    outcomes = []
    for change in (1 + 2**-22, 1 - 2**-22):
        model = with_tie()
        replace_call(model.layers[1].mlp, lambda call, x, by=change: call(x * by))
        report = verify(model, tied)
        outcomes.append((report.outcome, any("1 in layers.1.mlp" in n for n in report.notes)))
    assert sorted(outcomes) == [("ok", False), ("ok", True)]  # one way it jumps, the other it doesn't


def test_jumps_survive_the_file(tied, tmp_path):
    """What a block may do beyond its tolerance is the same when the reference is read."""
    tied.save(tmp_path / "tied.safetensors")
    assert Reference.load(tmp_path / "tied.safetensors").jumps == tied.jumps


def test_few_jumps_are_set_apart_and_many_are_the_blocks_way():
    """Up to a thirty-second of the rows is counted apart; beyond that all count."""

    def rows(jumping: int) -> Any:
        moved = np.full(100, 1e-7)
        moved[:jumping] = 1e-2
        return np.stack([moved, np.ones(100), moved], axis=1)

    smooth, jumping = separate_jumps([rows(0), rows(3)])
    assert smooth == (1e-7, 1e-7)
    assert jumping.tolist() == [1e-2] * 3
    smooth, jumping = separate_jumps([rows(0), rows(21)])
    assert smooth == (1e-2, 1e-2)
    assert not len(jumping)
    smooth, jumping = separate_jumps([np.zeros((5, 3))])
    assert (smooth, len(jumping)) == ((0, 0), 0)
    with pytest.raises(ValueError, match="jumps of 0 rows"):
        Jumps(0, 1.0)


@pytest.mark.parametrize("terms", [64, 4096, 16384])
def test_adding_in_another_order_stays_within_what_is_allowed_for_it(terms):
    """Sequential float32 sums, whole and in two to eight parts, differ by less than half of `reordering`."""
    rng = np.random.default_rng(terms)
    products = (rng.normal(size=(200, terms)) * rng.normal(size=(200, terms))).astype(np.float32)
    whole = np.cumsum(products, axis=1, dtype=np.float32)[:, -1]
    for parts in (2, 4, 8):
        total = np.zeros(200, np.float32)
        for part in np.split(products, parts, axis=1):
            total += np.cumsum(part, axis=1, dtype=np.float32)[:, -1]
        assert 0 < np.abs(total - whole).max() / np.abs(whole).max() < reordering(terms) / 2


def test_the_end_of_another_run_can_be_measured_by_itself():
    """The tolerance of free-running logits can be had for one run without a whole reference, and is like it."""
    reference = take_reference(llama(), PROMPT, 3)
    alone = end_tolerance(
        llama(), PROMPT, reference.teacher, reference.prefill_step, reference.logits, reference.positions
    )
    assert 0.3 < alone.relative / reference.tolerances["logits"].relative < 3


def test_opposite_draws_move_each_element_the_other_way():
    """Negative ulps of the same seed are the mirror image: what one draw doesn't flip, the other does."""
    x = mx.random.normal((1000,), key=mx.random.key(0))
    up, down = Rounding(0, 16)(x) - x, Rounding(0, -16)(x) - x
    assert mx.all(up * down < 0).item()
    with pytest.raises(ValueError, match="moves nothing"):
        Rounding(0, 0)
