"""A prompt and some decode steps through a model's cache, pass by pass, tapped or not."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from harness.forward import cache_state, chunks
from harness.taps import Handler, tapped
from sharding.forward import logits_of, make_cache

LOGITS_BYTES_LIMIT = 64 << 20
"""A prompt's logits are kept for as many positions, evenly spread, as fit into this."""


def spread_positions(
    tokens: int, batch: int, vocabulary: int, limit: int = LOGITS_BYTES_LIMIT
) -> tuple[int, ...]:
    """Which of a chunk's tokens to keep float32 logits of: all if they fit, else evenly spread ones and the last."""
    keep = max(1, min(tokens, limit // (4 * batch * vocabulary)))
    if keep == 1:
        return (tokens - 1,)
    return tuple(sorted({round(i * (tokens - 1) / (keep - 1)) for i in range(keep)}))


def run_passes(
    model: nn.Module,
    prompt: mx.array,
    teacher: mx.array,
    prefill_step: int,
    see: Callable[[int, mx.array], None],
    handler: Handler | None = None,
) -> None:
    """Feed a prompt and then given tokens through a new cache, pass by pass.

    Args:
        see: gets each pass's number and its logits, (batch, tokens, vocabulary), not yet evaluated.
        handler: taps for the model's blocks, told of each pass by `begin`.
    """
    tokens = [*chunks(prompt, prefill_step), *(teacher[:, i : i + 1] for i in range(teacher.shape[1]))]
    cache = make_cache(model)

    def run() -> None:
        for call, block in enumerate(tokens):
            if handler is not None:
                handler.begin(call)
            logits = logits_of(model(block, cache=cache))
            see(call, logits)
            mx.eval(logits, cache_state(cache))

    if handler is None:
        run()
    else:
        with tapped(model, handler):
            run()


def run_greedily(
    model: nn.Module, prompt: mx.array, decode_tokens: int, prefill_step: int, recorder: Handler
) -> tuple[list[mx.array], list[tuple[int, ...]], mx.array]:
    """A tapped run on the model's own greedy tokens.

    Returns:
        For each pass the float32 logits kept and the positions that they are of, and the tokens that were fed.
    """
    cache = make_cache(model)
    logits: list[mx.array] = []
    positions: list[tuple[int, ...]] = []
    chosen: list[mx.array] = []
    pending = list(chunks(prompt, prefill_step))
    with tapped(model, recorder):
        for call in range(len(pending) + decode_tokens):
            recorder.begin(call)
            tokens = pending[call] if call < len(pending) else chosen[-1]
            out = logits_of(model(tokens, cache=cache))
            keep = spread_positions(out.shape[1], out.shape[0], out.shape[2])
            logits.append(out[:, mx.array(keep)].astype(mx.float32))
            positions.append(keep)
            greedy = mx.argmax(out[:, -1:], axis=-1).astype(prompt.dtype)
            mx.eval(logits[-1], greedy, cache_state(cache))
            if call >= len(pending) - 1:
                chosen.append(greedy)
    return logits, positions, mx.concatenate(chosen[:decode_tokens], axis=1)
