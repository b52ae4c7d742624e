"""What the unsharded model does: its logits, its blocks' inputs and outputs, and how far its own rounding moves them.

    reference = take_reference(model, prompt, decode_tokens=12)
    reference.save(path)                                         # one rank writes it,
    reference = Reference.load(path)                             # every rank of the split model reads it

How its tolerances come about is told in `harness.noise`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from harness.arrays import load_arrays, save_arrays
from harness.distance import Tolerance, is_saturated
from harness.forward import PREFILL_STEP, chunks
from harness.noise import DRAWS, BrokenReferenceError, Jumps, measure_noise
from harness.passes import run_greedily
from harness.prompts import digest
from harness.taps import FLOAT_BYTES_LIMIT, Block, Record, Recorder, Visit

_FORMAT = "reference 1"


@dataclass(frozen=True)
class Reference:
    """One unsharded model's behaviour on one prompt.

    Attributes:
        prompt: token ids, (batch, tokens).
        teacher: the greedy tokens that follow, (batch, decode steps): what every model is fed.
        logits: of each forward pass, float32: the chunks of the prompt at `positions`, (batch, n, vocabulary), then
            one (batch, 1, vocabulary) a decode step.
        positions: for each pass, which of its tokens the logits are of.
        records: what each block got and gave, for the passes recorded.
        tolerances: by `"<block> input"` or `"<block> output"`, `"head"` for what follows the last block, and
            `"logits"` for the free-running end.
        prefill_step: tokens in a chunk of the prompt.
        prompt_digest: of `prompt`; ranks compare it with what they mean to run.
        notes: what a reader of a verdict should know about this reference.
        jumps: what blocks that select or round may do beyond their tolerance, at few tokens.
    """

    prompt: mx.array
    teacher: mx.array
    logits: tuple[mx.array, ...]
    positions: tuple[tuple[int, ...], ...]
    records: Mapping[Visit, Record]
    tolerances: Mapping[str, Tolerance]
    prefill_step: int
    prompt_digest: str
    notes: tuple[str, ...] = field(default=())
    jumps: Mapping[Block, Jumps] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prompt.ndim != 2 or self.teacher.ndim != 2 or self.prompt.shape[0] != self.teacher.shape[0]:
            raise ValueError(
                f"prompt {self.prompt.shape} and teacher {self.teacher.shape} must be (batch, tokens)"
            )
        passes = len(list(chunks(self.prompt, self.prefill_step))) + self.teacher.shape[1]
        if not (len(self.logits) == len(self.positions) == passes):
            raise ValueError(f"{len(self.logits)} sets of logits for {passes} passes")
        if not {"head", "logits"} <= set(self.tolerances):
            raise ValueError("a reference needs the tolerances of its head and of its logits")
        if self.prompt_digest != digest(self.prompt):
            raise ValueError("the prompt isn't the one that its digest names")

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The recorded blocks, in the order of execution."""
        return tuple(
            dict.fromkeys(v.block for v, _ in sorted(self.records.items(), key=lambda i: i[1].order))
        )

    def tolerance(self, block: Block, what: str) -> Tolerance:
        """How far this block's input or output may be off."""
        return self.tolerances[f"{block} {what}"]

    def save(self, path: Path) -> None:
        """Write everything as one safetensors file."""
        arrays = {"prompt": self.prompt, "teacher": self.teacher}
        for call, logits in enumerate(self.logits):
            arrays[f"logits.{call}"] = logits
        visits = []
        for n, (visit, record) in enumerate(self.records.items()):
            visits.append([visit.call, visit.block.layer, visit.block.module, visit.occurrence, record.order])
            arrays[f"x.{n}"], arrays[f"y.{n}"] = record.x, record.y
        about = {
            "format": _FORMAT,
            "visits": visits,
            "positions": self.positions,
            "tolerances": {k: [t.relative, t.row_relative] for k, t in self.tolerances.items()},
            "jumps": [[b.layer, b.module, j.rows, j.limit] for b, j in self.jumps.items()],
            "prefill_step": self.prefill_step,
            "prompt_digest": self.prompt_digest,
            "notes": self.notes,
        }
        save_arrays(path, arrays, about)

    @classmethod
    def load(cls, path: Path) -> Reference:
        """Read a file that `save` wrote; block records are read from disk when they are used.

        Raises:
            ValueError: the file isn't a reference of this version.
        """
        arrays, about = load_arrays(path)
        if about.get("format") != _FORMAT:
            raise ValueError(
                f"{path.name} has format {about.get('format')}, not {_FORMAT}: take the reference anew"
            )
        records = {
            Visit(call, Block(layer, module), occurrence): Record(order, arrays[f"x.{n}"], arrays[f"y.{n}"])
            for n, (call, layer, module, occurrence, order) in enumerate(about["visits"])
        }
        return cls(
            prompt=arrays["prompt"],
            teacher=arrays["teacher"],
            logits=tuple(arrays[f"logits.{call}"] for call in range(len(about["positions"]))),
            positions=tuple(tuple(p) for p in about["positions"]),
            records=records,
            tolerances={k: Tolerance(*v) for k, v in about["tolerances"].items()},
            prefill_step=about["prefill_step"],
            prompt_digest=about["prompt_digest"],
            notes=tuple(about["notes"]),
            jumps={Block(layer, module): Jumps(rows, limit) for layer, module, rows, limit in about["jumps"]},
        )


def take_reference(
    model: nn.Module,
    prompt: mx.array,
    decode_tokens: int,
    *,
    prefill_step: int = PREFILL_STEP,
    draws: int = DRAWS,
    seed: int = 0,
    max_record_bytes: int = FLOAT_BYTES_LIMIT,
    progress: Callable[[str], None] = lambda _: None,
) -> Reference:
    """Run the unsharded model, in one process, and measure its noise.

    Args:
        model: with float32 activations: those decide right or wrong.
        prompt: token ids, (batch, tokens), all rows of one length.
        decode_tokens: greedy steps through the cache after the prompt; at least one.
        prefill_step: tokens in one pass of the prompt; a longer prompt goes through the cache in several.
        draws: disturbed runs for the tolerances, each three times as long as the run itself.
        seed: of the disturbances.
        max_record_bytes: for the records of blocks; decode steps beyond it are compared by their logits only.
        progress: told what is about to happen, for a stall detector or a progress bar.

    Raises:
        BrokenReferenceError: the model's own numbers aren't finite.
        RecordsTooLargeError: the prompt's records alone are larger than allowed.
    """
    if decode_tokens < 1 or draws < 1:
        raise ValueError(
            f"a reference needs at least one decode token and one draw, not {decode_tokens}, {draws}"
        )
    progress("reference")
    recorder = Recorder(max_record_bytes)
    logits, positions, teacher = run_greedily(model, prompt, decode_tokens, prefill_step, recorder)
    check_finite(logits, recorder.records)

    noise = measure_noise(
        model, prompt, teacher, prefill_step, logits, positions, recorder.records, draws, seed, progress
    )
    notes = []
    if not recorder.complete:
        kept = len({v.call for v in recorder.records})
        notes.append(
            f"blocks were compared in the first {kept} of {len(logits)} passes: the others' records don't fit"
        )
    if sum(len(p) for p in positions) < prompt.shape[1] + decode_tokens:
        notes.append("logits of the prompt were compared at evenly spread positions: all of them don't fit")
    if _saturated(logits):
        notes.append("the unsharded model's own logits have next to no entropy: are the weights right?")
    return Reference(
        prompt=prompt,
        teacher=teacher,
        logits=tuple(logits),
        positions=tuple(positions),
        records=recorder.records,
        tolerances=noise.tolerances,
        jumps=noise.jumps,
        prefill_step=prefill_step,
        prompt_digest=digest(prompt),
        notes=tuple(notes),
    )


def check_finite(logits: Sequence[mx.array], records: Mapping[Visit, Record]) -> None:
    for visit, record in records.items():
        for what, value in (("input", record.x), ("output", record.y)):
            if not mx.all(mx.isfinite(value)).item():
                raise BrokenReferenceError(
                    f"the unsharded model's {visit.block} has an {what} that is not finite"
                )
    for call, value in enumerate(logits):
        if not mx.all(mx.isfinite(value)).item():
            raise BrokenReferenceError(f"the unsharded model's logits in pass {call} are not finite")


def _saturated(logits: Sequence[mx.array]) -> bool:
    entropies: list[float] = []
    for value in logits:
        p = mx.softmax(value[0], axis=-1, precise=True)
        entropies += np.array(-(p * mx.log(mx.maximum(p, 1e-30))).sum(-1)).tolist()
    return is_saturated(entropies)
