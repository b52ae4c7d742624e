"""A batch of prompts of unequal lengths: the split model's against the whole model's, end to end.

mlx-lm and mlx-vlm batch such prompts alike: the caches of single sequences are merged into a batch cache (`merge`),
told the lengths (`prepare`), fed prompts padded on the right, and then rolled so that the padding is on the left
(`finalize`). That exists for plain, rotating, recurrent and DeepSeek V4's pooling caches, and for lists of them.
Where a cache lacks it, or the unsharded model's batch differs from its own sequences one by one, there is nothing to
hold a split model against, and `RaggedUnsupportedError` says why.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from harness.arrays import load_arrays, save_arrays
from harness.distance import Distance, Tolerance, compare_logits, distance
from harness.equivalence import Divergence, Report, digest_arrays
from harness.forward import PREFILL_STEP, cache_state, chunks
from harness.noise import FREE_FACTOR, FREE_ULPS, reordering
from harness.taps import Disturber, Rounding, find_blocks, tapped, widest_reduction
from sharding.forward import logits_of, make_cache

MODULE = "ragged batch"
_FORMAT = "ragged reference 1"


class RaggedUnsupportedError(ValueError):
    """Prompts of unequal lengths can't be batched for this model; the message says why."""


@dataclass(frozen=True)
class RaggedReference:
    """What the unsharded model does with prompts of unequal lengths in one batch.

    Attributes:
        prompts: the token ids, one row a sequence, of at least two tokens each.
        teacher: greedy tokens that every model is fed after them, (batch, decode steps).
        logits: float32, (batch, decode steps + 1, vocabulary), from the prompts' last tokens on.
        tolerance: for the logits, measured as in `harness.noise`.
        prefill_step: tokens in a chunk of the padded prompts.
    """

    prompts: tuple[tuple[int, ...], ...]
    teacher: mx.array
    logits: mx.array
    tolerance: Tolerance
    prefill_step: int = PREFILL_STEP

    def __post_init__(self) -> None:
        if len(self.prompts) < 2 or min(map(len, self.prompts)) < 2:
            raise ValueError("a ragged batch has at least two prompts of at least two tokens each")
        batch, steps = self.teacher.shape
        if batch != len(self.prompts) or tuple(self.logits.shape[:2]) != (batch, steps + 1):
            raise ValueError(
                f"{len(self.prompts)} prompts, tokens {self.teacher.shape}, logits {self.logits.shape}"
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        return tuple(len(p) for p in self.prompts)

    def save(self, path: Path) -> None:
        """Write one safetensors file."""
        about = {
            "format": _FORMAT,
            "prompts": self.prompts,
            "tolerance": [self.tolerance.relative, self.tolerance.row_relative],
            "prefill_step": self.prefill_step,
        }
        save_arrays(path, {"teacher": self.teacher, "logits": self.logits}, about)

    @classmethod
    def load(cls, path: Path) -> RaggedReference:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is something else.
        """
        arrays, about = load_arrays(path)
        if about.get("format") != _FORMAT:
            raise ValueError(
                f"{path.name}: format {about.get('format')}, not {_FORMAT}; take the reference anew"
            )
        return cls(
            tuple(tuple(p) for p in about["prompts"]),
            arrays["teacher"],
            arrays["logits"],
            Tolerance(*about["tolerance"]),
            about["prefill_step"],
        )


def make_ragged_cache(model: nn.Module, lengths: Sequence[int]) -> list[Any]:
    """An empty batch cache for right-padded prompts of these lengths.

    Raises:
        RaggedUnsupportedError: a cache of this model can't be merged or prepared.
    """
    rows = [make_cache(model) for _ in lengths]
    padding = [max(lengths) - n for n in lengths]
    merged = []
    for entries in zip(*rows, strict=True):
        kind = type(entries[0])
        if not hasattr(kind, "merge"):
            raise RaggedUnsupportedError(
                f"prompts of unequal lengths: {kind.__name__} can't be batched (no `merge`)"
            )
        try:
            cache = kind.merge(list(entries))
            cache.prepare(lengths=list(lengths), right_padding=padding)
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise RaggedUnsupportedError(f"prompts of unequal lengths: {kind.__name__}: {error}") from error
        if not hasattr(cache, "finalize"):
            raise RaggedUnsupportedError(
                f"prompts of unequal lengths: {type(cache).__name__} has no `finalize`"
            )
        merged.append(cache)
    return merged


def run_ragged(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    teacher: mx.array | int,
    prefill_step: int = PREFILL_STEP,
) -> tuple[mx.array, mx.array]:
    """Read the padded prompts, all but their last tokens, then decode from those.

    Args:
        teacher: the tokens to feed after the prompts, (batch, steps), or how many greedy ones.

    Returns:
        Float32 logits (batch, steps + 1, vocabulary), and the tokens that were fed.
    """
    lengths = [len(p) - 1 for p in prompts]
    padded = mx.array([[*p[:-1], *[0] * (max(lengths) - n)] for p, n in zip(prompts, lengths, strict=True)])
    cache = make_ragged_cache(model, lengths)
    for piece in chunks(padded, prefill_step):
        model(piece, cache=cache)
        mx.eval(cache_state(cache))
    for entry in cache:
        entry.finalize()
    mx.eval(cache_state(cache))
    tokens = mx.array([[p[-1]] for p in prompts])
    logits: list[mx.array] = []
    fed: list[mx.array] = []
    steps = teacher if isinstance(teacher, int) else teacher.shape[1]
    for n in range(steps + 1):
        out = logits_of(model(tokens, cache=cache))[:, -1:].astype(mx.float32)
        mx.eval(out, cache_state(cache))
        logits.append(out)
        if n < steps:
            tokens = mx.argmax(out, axis=-1) if isinstance(teacher, int) else teacher[:, n : n + 1]
            fed.append(tokens)
    return mx.concatenate(logits, axis=1), mx.concatenate(fed, axis=1)


def take_ragged(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    decode_tokens: int,
    *,
    prefill_step: int = PREFILL_STEP,
    draws: int = 1,
    seed: int = 0,
) -> RaggedReference:
    """Run the unsharded model on a ragged batch, measure its noise, and check it against its rows one by one.

    Args:
        prompts: token ids of unequal lengths; float32 activations in the model.
        decode_tokens: greedy steps; at least one.

    Raises:
        RaggedUnsupportedError: the model can't do it, or not rightly.
    """
    rows = tuple(tuple(int(t) for t in p) for p in prompts)
    if decode_tokens < 1 or draws < 1:
        raise ValueError(
            f"a reference needs a decode token and a draw at least, not {decode_tokens}, {draws}"
        )
    if len(rows) < 2 or min(map(len, rows)) < 2:
        raise ValueError("a ragged batch has at least two prompts of at least two tokens each")
    try:
        logits, teacher = run_ragged(model, rows, decode_tokens, prefill_step)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, RaggedUnsupportedError):
            raise
        raise RaggedUnsupportedError(
            f"prompts of unequal lengths: the unsharded model fails: {error}"
        ) from error
    relative = row = 0.0
    for draw, sign in itertools.product(range(draws), (1, -1)):
        handler = Disturber(Rounding(seed * 1000 + draw, sign * FREE_ULPS))
        with tapped(model, handler):
            moved, _ = run_ragged(model, rows, teacher, prefill_step)
        noise = _comparable(distance(moved, logits))
        relative, row = max(relative, noise.relative), max(row, noise.row_relative)
    floor = reordering(max(*map(len, rows), *map(widest_reduction, find_blocks(model).values())))
    tolerance = Tolerance(FREE_FACTOR * relative + floor, FREE_FACTOR * row + floor)
    for n, prompt in enumerate(rows):
        alone = _alone(model, prompt, teacher[n : n + 1], prefill_step)
        far = distance(logits[n : n + 1], alone)
        if far.exceeds(tolerance):
            raise RaggedUnsupportedError(
                f"prompts of unequal lengths: the unsharded model's batch differs from its own sequence of "
                f"{len(prompt)} tokens by {far.relative:.2g}, {tolerance.relative:.2g} is rounding"
            )
    return RaggedReference(rows, teacher, logits, tolerance, prefill_step)


def include_ragged(report: Report, model: nn.Module, reference: RaggedReference) -> Report:
    """The report with the ragged batch checked, too; every rank must call this at the same time."""
    logits, _ = run_ragged(model, reference.prompts, reference.teacher, reference.prefill_step)
    comparison = compare_logits(logits, reference.logits, reference.tolerance.relative)
    far = comparison.distance
    lengths = ", ".join(map(str, reference.lengths))
    note = f"prompts of {lengths} tokens in one batch: off by {far.relative:.2g}, {reference.tolerance.relative:.2g} is rounding"
    found = replace(
        report,
        notes=(*report.notes, note),
        ties=report.ties + comparison.ties,
        logits_digest=digest_arrays([np.array(logits)], report.logits_digest),
        tokens_digest=digest_arrays([np.array(mx.argmax(logits, axis=-1))], report.tokens_digest),
    )
    if not far.exceeds(reference.tolerance):
        return found
    divergence = Divergence(None, MODULE, "logits", 0, 0, far, reference.tolerance)
    return replace(
        found,
        outcome="wrong",
        reasons=(*report.reasons, divergence.describe(1)),
        divergence=report.divergence or divergence,
        max_abs_diff=max(report.max_abs_diff, far.max_abs),
        relative_diff=max(report.relative_diff, far.relative),
        top1_agreement=min(report.top1_agreement, comparison.top1_agreement),
    )


def _alone(model: nn.Module, prompt: Sequence[int], teacher: mx.array, prefill_step: int) -> mx.array:
    """One sequence by itself through a plain cache, logits as `run_ragged` gives them."""
    ids = mx.array([prompt])
    cache = make_cache(model)
    for piece in chunks(ids[:, :-1], prefill_step):
        model(piece, cache=cache)
        mx.eval(cache_state(cache))
    logits = []
    for tokens in (ids[:, -1:], *(teacher[:, i : i + 1] for i in range(teacher.shape[1]))):
        out = logits_of(model(tokens, cache=cache))[:, -1:].astype(mx.float32)
        mx.eval(out, cache_state(cache))
        logits.append(out)
    return mx.concatenate(logits, axis=1)


def _comparable(d: Distance) -> Distance:
    if d.problem is not None:
        raise RaggedUnsupportedError(f"prompts of unequal lengths: the unsharded model gives {d.problem}")
    return d
