"""Prompts of unequal lengths in one batch: right where the caches can, refused in words where they can't."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from harness.equivalence import verify
from harness.prompts import ragged_lengths, random_prompt
from harness.ragged import RaggedReference, RaggedUnsupportedError, include_ragged, run_ragged, take_ragged
from harness.reference import take_reference
from tests.harness.small_models import (
    VOCABULARY,
    deepseek_v4,
    gemma3,
    llama,
    replace_call,
    split_llama,
    split_v4,
)

LENGTHS = ragged_lengths(4, 26)
PROMPTS = [random_prompt(VOCABULARY, 1, n, seed=n)[0].tolist() for n in LENGTHS]


@pytest.mark.parametrize(
    ("build", "split"),
    [(llama, split_llama), (gemma3, split_llama), (deepseek_v4, split_v4)],
    ids=lambda f: f.__name__,
)
def test_a_correct_split_passes_and_a_broken_one_fails(build, split, tmp_path):
    """Plain, rotating and pooling caches: the split model's ragged batch is the whole model's, through a file, too."""
    taken = take_ragged(build(), PROMPTS, 5, draws=1)
    taken.save(tmp_path / "ragged.safetensors")
    reference = RaggedReference.load(tmp_path / "ragged.safetensors")
    assert reference.lengths == LENGTHS
    assert reference.tolerance == taken.tolerance
    plain = take_reference(build(), mx.array([PROMPTS[0][:4]]), 1, draws=1)
    model = split(build(), 2)
    report = verify(model, plain)
    found = include_ragged(report, model, reference)
    assert found.outcome == "ok"
    assert "prompts of 26, 19, 13, 6 tokens in one batch" in found.notes[-1]
    assert found.tokens_digest != report.tokens_digest
    model.lm_head.weight = model.lm_head.weight * 1.001
    broken = include_ragged(report, model, reference)
    assert broken.outcome == "wrong"
    assert broken.first_divergence == {"layer": None, "module": "ragged batch"}


def test_a_fault_that_only_unequal_lengths_show_is_found():
    """A block that ignores the padding's mask is right for equal prompts and wrong for unequal ones."""
    plain = take_reference(llama(), mx.array([PROMPTS[0], PROMPTS[0][::-1]]), 2, draws=1)
    reference = take_ragged(llama(), PROMPTS, 3, draws=1)
    model: Any = llama()

    def unmasked(call: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return call(x, "causal" if x.shape[1] > 1 else None, cache)

    replace_call(model.layers[1].self_attn, unmasked)
    report = verify(model, plain)
    assert report.outcome == "ok"
    assert include_ragged(report, model, reference).outcome == "wrong"


def test_each_row_is_what_the_sequence_alone_gives():
    """The batch's logits of a sequence are those of the sequence by itself, to rounding."""
    logits, fed = run_ragged(llama(), PROMPTS, 3)
    assert (logits.shape, fed.shape) == ((4, 4, VOCABULARY), (4, 3))
    reference = take_ragged(llama(), PROMPTS, 3, draws=1)
    assert mx.array_equal(reference.logits, logits)


def test_a_model_whose_batch_is_wrong_is_no_reference():
    """If the unsharded model's ragged batch isn't its own sequences one by one, that is said, with numbers."""
    model: Any = llama()

    def unmasked(call: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return call(x, "causal" if x.shape[1] > 1 else None, cache)

    replace_call(model.layers[1].self_attn, unmasked)
    with pytest.raises(RaggedUnsupportedError, match="differs from its own sequence of 19 tokens"):
        take_ragged(model, PROMPTS, 2, draws=1)


def test_a_cache_that_cannot_be_batched_is_refused():
    """A cache without batching is named, as is one that keeps the first tokens for good."""
    from mlx_lm.models.cache import ChunkedKVCache

    class Chunked:
        layers: tuple[Any, ...] = ()

        def make_cache(self) -> list[Any]:
            return [ChunkedKVCache(8)]

    with pytest.raises(RaggedUnsupportedError, match=r"ChunkedKVCache can't be batched \(no `merge`\)"):
        take_ragged(Chunked(), PROMPTS, 2)  # type: ignore[arg-type]


def test_prompts_that_make_no_ragged_batch_are_refused():
    """One prompt, or one without anything before its last token, is no ragged batch."""
    for prompts in ([[1, 2, 3]], [[1, 2, 3], [1]]):
        with pytest.raises(ValueError, match="at least two"):
            take_ragged(llama(), prompts, 2)
