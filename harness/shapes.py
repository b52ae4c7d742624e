"""The reference at a timed shape: end-to-end logits only, with the tolerance that this very run has.

Every timed case is checked at its own batch and context. The records of blocks there would be gigabytes; the
blocks were compared one by one at a smaller shape already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from harness.forward import PREFILL_STEP
from harness.noise import end_tolerance
from harness.passes import run_greedily
from harness.prompts import digest
from harness.reference import Reference, check_finite


class _Untouched:
    """A tap's handler that does nothing."""

    def begin(self, call: int) -> None:
        """A new pass."""

    def __call__(self, block: Any, forward: Callable[[mx.array], Any], x: mx.array) -> Any:
        return forward(x)


def take_shape(model: nn.Module, prompt: mx.array, decode_tokens: int) -> Reference:
    """Run the whole model on a prompt of the timed shape, and twice more to measure its noise there.

    Args:
        model: With float32 activations.
        prompt: Token ids (batch, tokens).
        decode_tokens: Greedy steps through the cache after the prompt.

    Raises:
        BrokenReferenceError: The model's own numbers aren't finite.
    """
    logits, positions, teacher = run_greedily(model, prompt, decode_tokens, PREFILL_STEP, _Untouched())
    check_finite(logits, {})
    tolerance = end_tolerance(model, prompt, teacher, PREFILL_STEP, logits, positions)
    return Reference(
        prompt=prompt,
        teacher=teacher,
        logits=tuple(logits),
        positions=tuple(positions),
        records={},
        tolerances={"logits": tolerance, "head": tolerance},
        prefill_step=PREFILL_STEP,
        prompt_digest=digest(prompt),
        notes=(),
    )
