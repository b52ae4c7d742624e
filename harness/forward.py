"""A prompt in pieces through a model's cache, and what must be evaluated for it to have happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

PREFILL_STEP = 2048
"""Prompt tokens per forward pass of a prefill; mlx-lm's own default."""


def cache_state(cache: Sequence[Any]) -> list[Any]:
    """What `mx.eval` must be given for every write into the cache to have happened."""
    return [entry.state for entry in cache]


def chunks(prompt: mx.array, step: int = PREFILL_STEP) -> Iterator[mx.array]:
    """The prompt, shape (batch, tokens), in pieces of at most `step` tokens.

    Raises:
        ValueError: the prompt isn't a non-empty (batch, tokens) array, or the step isn't positive.
    """
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ValueError(f"a prompt has the shape (batch, tokens), both at least 1, not {prompt.shape}")
    if step < 1:
        raise ValueError(f"a prefill step of {step} tokens: it must be at least 1")
    for start in range(0, prompt.shape[1], step):
        yield prompt[:, start : start + step]
