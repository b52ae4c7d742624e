"""Any mlx-lm or mlx-vlm language model as a function: tokens and a cache in, logits out."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sharding.models import import_model_module


def logits_of(output: Any) -> mx.array:
    """The logits in what a model returned.

    mlx-lm's models return the array, mlx-vlm's an object that holds it.

    Raises:
        TypeError: There are no logits in it.
    """
    logits = getattr(output, "logits", output)
    if not isinstance(logits, mx.array):
        raise TypeError(f"the model returned {type(output).__name__}, which is neither logits nor holds any")
    return logits


def make_cache(model: nn.Module) -> list[Any]:
    """A new, empty cache for one batch: the model's own `make_cache` if it has one, else one KV cache a layer."""
    if hasattr(model, "make_cache"):
        return list(model.make_cache())
    return list(import_model_module("mlx_lm.models.cache").make_prompt_cache(model))
