"""Prompts: the same token ids on every rank, of exactly the length asked for, and a digest to prove it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


def random_prompt(
    vocabulary: int, batch: int, tokens: int, *, seed: int, repeat: int = 0, avoid: Collection[int] = ()
) -> Ids:
    """Seeded random token ids, shape (batch, tokens).

    The numbers come from the bit stream of PCG64, which numpy promises not to change. All first tokens differ, within
    a batch and between repeats (until the vocabulary is used up), so that no cache of prefixes can answer twice.

    Args:
        vocabulary: ids are below it.
        seed: with `repeat`, decides everything.
        repeat: another prompt of the same kind.
        avoid: ids that never occur (end of sequence, images, ...); those outside the vocabulary are ignored.

    Raises:
        ValueError: a size below 1, or nothing left to choose from.
    """
    if batch < 1 or tokens < 1 or vocabulary < 1 or repeat < 0:
        raise ValueError(f"no prompt of {batch} x {tokens} tokens from {vocabulary}, repeat {repeat}")
    allowed = np.setdiff1d(np.arange(vocabulary, dtype=np.int32), np.asarray(sorted(avoid), dtype=np.int32))
    if not len(allowed):
        raise ValueError(f"every one of the {vocabulary} ids is to be avoided")
    bits = np.random.PCG64(np.random.SeedSequence([seed, repeat]))
    ids = allowed[_draw(bits, batch * tokens, len(allowed))].reshape(batch, tokens)
    start = int(_draw(np.random.PCG64(np.random.SeedSequence([seed])), 1, len(allowed))[0])
    ids[:, 0] = allowed[(start + repeat * batch + np.arange(batch)) % len(allowed)]
    return ids


def _draw(bits: np.random.PCG64, count: int, below: int) -> npt.NDArray[np.int64]:
    raw = np.atleast_1d(bits.random_raw(count))
    result: npt.NDArray[np.int64] = (raw % np.uint64(below)).astype(np.int64)
    return result


def text_prompt(ids: Sequence[int], batch: int, tokens: int, *, repeat: int = 0) -> Ids:
    """A text's ids as a prompt, shape (batch, tokens), exactly that many: the text goes round where it is shorter.

    No special tokens or chat template are added, and nothing goes back through text, so the length holds. Each row of
    a batch, and each repeat, starts at another place of the text.

    Raises:
        ValueError: a size below 1, or no ids.
    """
    if batch < 1 or tokens < 1 or repeat < 0 or not len(ids):
        raise ValueError(f"no prompt of {batch} x {tokens} tokens from {len(ids)} ids, repeat {repeat}")
    source = np.asarray(ids, dtype=np.int32)
    starts = [row * len(source) // batch + repeat * tokens for row in range(batch)]
    return source[np.stack([(start + np.arange(tokens)) % len(source) for start in starts])]


def ragged_lengths(batch: int, longest: int) -> tuple[int, ...]:
    """Unequal prompt lengths for a batch: the longest first, then ever shorter, none below 2.

    Raises:
        ValueError: fewer than two prompts, or too few tokens for any two to differ.
    """
    if batch < 2 or longest < 3:
        raise ValueError(f"no unequal lengths for {batch} prompts of up to {longest} tokens")
    return tuple(max(2, longest * (batch - i) // batch) for i in range(batch))


def digest(prompt: Ids | mx.array | Sequence[Sequence[int]]) -> str:
    """A short name of exactly these ids in this shape, the same for every integer type and kind of array."""
    ids = np.asarray(prompt if not isinstance(prompt, mx.array) else np.array(prompt), dtype="<i8")
    return hashlib.sha256(repr(ids.shape).encode() + ids.tobytes()).hexdigest()[:32]
