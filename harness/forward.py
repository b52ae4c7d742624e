"""One forward pass of any mlx-lm or mlx-vlm language model: tokens in, logits out, through a cache of its own making."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

PREFILL_STEP = 2048
"""Prompt tokens per forward pass of a prefill; mlx-lm's own default."""


def logits_of(output: Any) -> mx.array:
    """The logits in what a model returned.

    mlx-lm's models return the array, mlx-vlm's an object that holds it.

    Raises:
        TypeError: there are no logits in it.
    """
    logits = getattr(output, "logits", output)
    if not isinstance(logits, mx.array):
        raise TypeError(f"the model returned {type(output).__name__}, which is neither logits nor holds any")
    return logits


def make_cache(model: nn.Module) -> list[Any]:
    """A new, empty cache for one batch: the model's own `make_cache` if it has one, else one KV cache a layer."""
    if hasattr(model, "make_cache"):
        return list(model.make_cache())
    # Imported late: mlx_lm's package costs most of a second, and models with a cache of their own don't need it.
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


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
