"""One rank with the whole model: it writes what the model does, for the ranks to be held against."""

from __future__ import annotations

import gc
import traceback
from dataclasses import asdict

import mlx.core as mx
import mlx.nn as nn

from harness import blas, environment, precision
from harness.prompts import ragged_lengths
from harness.ragged import RaggedUnsupportedError, take_ragged
from harness.reference import BrokenReferenceError, Reference, take_reference
from harness.shapes import take_shape
from harness.taps import RecordsTooLargeError
from harness.work.base import Worker, one_line, prompt_of
from sharding import load


class ReferenceWorker(Worker):
    """One rank with the whole model."""

    def main(self) -> int:
        """Write the references that are asked for; files go into this rank's folder."""
        try:
            self._write()
        except (BrokenReferenceError, RecordsTooLargeError) as error:
            self.say("broken", reason=str(error))
        return 0

    def _write(self) -> None:
        self.say("rank", view=environment.rank_view(blas.loaded_blas()))
        self.begin("reference", [])
        model = self.whole("float32")
        load.settle(model, lambda: self.sometimes("progress", what="load the whole model"))
        settings = self.settings
        prompt = prompt_of(self.work, settings["check_batch"], settings["check_prompt"])
        reference = take_reference(
            model, prompt, settings["check_decode"], progress=lambda what: self.say("progress", what=what)
        )
        reference.save(self.context.folder / "check.safetensors")
        if settings["ragged"]:
            self._ragged(model, prompt)
        for shape in self.shapes:
            self.say("progress", what=f"reference at batch {shape.batch}, context {shape.context}")
            at_shape = take_shape(
                model,
                prompt_of(self.work, shape.batch, shape.context),
                settings["shape_decode"],
            )
            at_shape.save(self.context.folder / f"{shape.name}.safetensors")
        if self.source.dtype != "float32":
            del model
            gc.collect()
            self._low_precision(reference)
        self.say(
            "referenced",
            peak_bytes=mx.get_peak_memory(),
            blocks=[str(block) for block in reference.blocks],
        )

    def _ragged(self, model: nn.Module, prompt: mx.array) -> None:
        batch, longest = prompt.shape
        if batch < 2 or longest < 4:
            self.say(
                "note",
                text="prompts of unequal lengths: not checked, the check has one sequence or too short ones",
            )
            return
        ids: list[list[int]] = prompt.tolist()  # type: ignore[assignment]
        rows = [row[:length] for row, length in zip(ids, ragged_lengths(batch, longest), strict=True)]
        try:
            ragged = take_ragged(model, rows, self.settings["check_decode"])
        except RaggedUnsupportedError as error:
            self.say("note", text=f"not supported: {error}")
            return
        ragged.save(self.context.folder / "ragged.safetensors")

    def _low_precision(self, reference: Reference) -> None:
        try:
            model = self.whole(self.source.dtype)
            load.settle(model)
            found = precision.spread(model, reference)
            mx.eval(mx.zeros(1))
        except Exception as error:  # A kernel that this backend lacks, for one.
            traceback.print_exc()
            self.say("unsupported_dtype", reason=one_line(error))
            return
        self.say("spread", **asdict(found))
