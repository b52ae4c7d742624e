"""Prompts are of the asked length, the same everywhere, and provably so."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.prompts import digest, ragged_lengths, random_prompt, text_prompt


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 6), st.integers(1, 50), st.integers(0, 2**40), st.integers(0, 5))
def test_random_prompts_have_the_asked_shape_and_range(vocabulary, batch, tokens, seed, repeat):
    """Whatever the sizes: exactly that shape, every id below the vocabulary, the same again from the same seed."""
    ids = random_prompt(vocabulary, batch, tokens, seed=seed, repeat=repeat)
    assert ids.shape == (batch, tokens)
    assert ids.min() >= 0
    assert ids.max() < vocabulary
    assert digest(ids) == digest(random_prompt(vocabulary, batch, tokens, seed=seed, repeat=repeat))


def test_a_random_prompt_never_changes():
    """The ids of a seed are fixed for good: results of different versions and machines are of the same prompt."""
    assert random_prompt(1000, 2, 4, seed=7).tolist() == [[43, 325, 786, 314], [44, 372, 528, 805]]


def test_ids_to_avoid_never_occur():
    """Special ids are left out, those beyond the vocabulary are no trouble, and nothing left is an error."""
    ids = random_prompt(8, 4, 200, seed=0, avoid={0, 3, 900})
    assert set(np.unique(ids)) == {1, 2, 4, 5, 6, 7}
    with pytest.raises(ValueError, match="every one of the 2 ids"):
        random_prompt(2, 1, 1, seed=0, avoid={0, 1})


def test_no_two_prompts_begin_alike():
    """First tokens differ within a batch and between repeats, so that a cache of prefixes has nothing to reuse."""
    first = [t for repeat in range(5) for t in random_prompt(100, 4, 3, seed=1, repeat=repeat)[:, 0].tolist()]
    assert len(set(first)) == len(first) == 20


def test_seeds_and_repeats_differ_in_more_than_the_first_token():
    """Another seed or another repeat is another prompt throughout."""
    base = random_prompt(10_000, 1, 50, seed=1)
    for other in (random_prompt(10_000, 1, 50, seed=2), random_prompt(10_000, 1, 50, seed=1, repeat=1)):
        assert (base == other).mean() < 0.1


def test_impossible_sizes_are_refused():
    """No tokens, no batch or no vocabulary is an error, not an empty prompt."""
    for sizes in ((10, 0, 1), (10, 1, 0), (0, 1, 1)):
        with pytest.raises(ValueError, match="no prompt of"):
            random_prompt(*sizes, seed=0)


def test_text_has_exactly_the_asked_number_of_tokens():
    """Short texts go round and long ones are cut; rows of a batch and repeats start at other places."""
    ids = [1, 2, 3, 4, 5]
    assert text_prompt(ids, 1, 3).tolist() == [[1, 2, 3]]
    assert text_prompt(ids, 1, 12).tolist() == [[1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]]
    assert text_prompt(ids, 2, 4).tolist() == [[1, 2, 3, 4], [3, 4, 5, 1]]
    assert text_prompt(ids, 1, 3, repeat=1).tolist() == [[4, 5, 1]]


def test_a_text_that_cannot_be_a_prompt_is_refused():
    """No ids make no prompt, and neither does a size of nothing."""
    for arguments in (([], 1, 3), ([1], 0, 3), ([1], 1, 0)):
        with pytest.raises(ValueError, match="no prompt of"):
            text_prompt(*arguments)


def test_a_digest_names_ids_and_shape_only():
    """Lists, numpy and MLX arrays of any integer type agree; another order or another shape doesn't."""
    ids = [[1, 2], [3, 4]]
    same = {
        digest(ids),
        digest(np.array(ids, np.int64)),
        digest(np.array(ids, np.uint8)),
        digest(mx.array(ids)),
    }
    assert len(same) == 1
    assert digest([[1, 2, 3, 4]]) not in same
    assert digest([[1, 2], [4, 3]]) not in same
    assert digest(np.asfortranarray(ids)) in same


def test_ragged_lengths_are_unequal():
    """The longest comes first, all are of two tokens at least, and what can't be unequal is refused."""
    assert ragged_lengths(4, 40) == (40, 30, 20, 10)
    assert ragged_lengths(3, 4) == (4, 2, 2)
    for batch, longest in ((1, 40), (4, 2)):
        with pytest.raises(ValueError, match="no unequal lengths"):
            ragged_lengths(batch, longest)
