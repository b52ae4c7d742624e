"""A reference holds what the unsharded model did and how far its own rounding moves it, and survives a file."""

from __future__ import annotations

import stat
from dataclasses import replace

import mlx.core as mx
import pytest

from harness.noise import BrokenReferenceError
from harness.passes import spread_positions
from harness.prompts import random_prompt
from harness.reference import Reference, take_reference
from harness.taps import find_blocks
from sharding.forward import make_cache
from tests.harness.small_models import VOCABULARY, llama

PROMPT = mx.array(random_prompt(VOCABULARY, 2, 19, seed=0))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return take_reference(llama(), PROMPT, 4, draws=1)


def test_the_reference_is_the_models_own_greedy_run(reference):
    """Its tokens and logits are those of the model run plainly, prompt first and then step by step through a cache."""
    model = llama()
    cache = make_cache(model)
    tokens, chosen = PROMPT, []
    for kept in reference.logits:
        logits = model(tokens, cache=cache)
        assert mx.array_equal(logits, kept)
        tokens = mx.argmax(logits[:, -1:], axis=-1)
        chosen.append(tokens)
    assert mx.array_equal(mx.concatenate(chosen[:4], axis=1), reference.teacher)


def test_every_block_of_every_pass_is_recorded(reference):
    """Prompt and each decode step: one record of each block."""
    assert reference.blocks == tuple(find_blocks(llama()))
    assert {v.call for v in reference.records} == {0, 1, 2, 3, 4}
    assert len(reference.records) == 5 * 6


def test_a_file_brings_everything_back(reference, tmp_path):
    """What is loaded is what was saved, bit by bit, in bfloat16, too; the file is its owner's alone."""
    visit, record = next(iter(reference.records.items()))
    low = replace(record, y=record.y.astype(mx.bfloat16))
    mixed = replace(reference, records={**reference.records, visit: low}, notes=("a note",))
    path = tmp_path / "reference.safetensors"
    mixed.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    back = Reference.load(path)
    assert back.tolerances == mixed.tolerances
    assert (back.positions, back.prefill_step, back.notes) == (
        mixed.positions,
        mixed.prefill_step,
        mixed.notes,
    )
    assert back.records[visit].y.dtype == mx.bfloat16
    for key, kept in mixed.records.items():
        assert mx.array_equal(back.records[key].x, kept.x)
        assert mx.array_equal(back.records[key].y, kept.y)
        assert back.records[key].order == kept.order
    assert all(mx.array_equal(a, b) for a, b in zip(back.logits, mixed.logits, strict=True))


def test_a_file_that_is_no_reference_is_refused(reference, tmp_path):
    """A cut-off file, another file and a missing one are each one clear error."""
    path = tmp_path / "cut.safetensors"
    reference.save(path)
    path.write_bytes(path.read_bytes()[:3000])
    other = tmp_path / "other.safetensors"
    mx.save_safetensors(str(other), {"a": mx.zeros(3)})
    for bad in (path, other, tmp_path / "missing.safetensors"):
        with pytest.raises(ValueError, match="can't be read as a reference"):
            Reference.load(bad)


def test_another_prompt_under_the_same_digest_is_refused(reference):
    """A reference whose prompt isn't the one its digest names can't be made."""
    with pytest.raises(ValueError, match="isn't the one that its digest names"):
        replace(reference, prompt=reference.prompt + 1)


def test_a_broken_model_is_no_reference():
    """NaN in the unsharded model is its own error, named by block, not a comparison."""
    model = llama()
    model.layers[1].mlp.down_proj.weight = model.layers[1].mlp.down_proj.weight * float("nan")
    with pytest.raises(BrokenReferenceError, match=r"layers\.1\.mlp has an output that is not finite"):
        take_reference(model, PROMPT, 1, draws=1)


def test_a_long_prompt_goes_through_in_chunks():
    """With a small prefill step the prompt takes several passes, each recorded and compared."""
    taken = take_reference(llama(), PROMPT, 2, prefill_step=8, draws=1)
    assert [len(p) for p in taken.positions] == [8, 8, 3, 1, 1]
    assert {v.call for v in taken.records} == {0, 1, 2, 3, 4}


def test_kept_positions_are_spread_and_end_with_the_last():
    """Where not all logits fit, evenly spread ones are kept, the last among them."""
    assert spread_positions(5, 2, 10) == (0, 1, 2, 3, 4)
    some = spread_positions(100, 1, 100, limit=100 * 4 * 10)
    assert (len(some), some[0], some[-1]) == (10, 0, 99)
    assert spread_positions(100, 64, 200_000, limit=1) == (99,)


def test_what_is_left_out_is_said():
    """Records that don't fit are left out from some pass on, and the reference says so."""
    one_pass = 6 * 2 * 2 * 19 * 64 * 4
    taken = take_reference(llama(), PROMPT, 3, draws=1, max_record_bytes=one_pass + 5_000)
    assert {v.call for v in taken.records} == {0}
    assert "first 1 of 4 passes" in taken.notes[0]


def test_a_reference_of_nothing_is_refused():
    """No decode token or no draw would leave something unmeasured."""
    for decode, draws in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one decode token and one draw"):
            take_reference(llama(), PROMPT, decode, draws=draws)
