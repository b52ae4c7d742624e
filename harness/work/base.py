"""What all kinds of work share: the source, prompts, events, and signs of progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from harness.prompts import random_prompt, text_prompt
from harness.rank import RankContext
from sharding import load
from sharding.source import Source

HEARTBEAT_SECONDS = 5.0


@dataclass(frozen=True)
class Shape:
    """One timed shape: sequences at once, and prompt tokens of each."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        """Used in file names and events."""
        return f"b{self.batch}-c{self.context}"


def prompt_of(work: Mapping[str, Any], batch: int, tokens: int, repeat: int = 0) -> mx.array:
    """Token ids (batch, tokens), the same on every rank and in the reference.

    A text arrives as ids; a repeat starts further on in it, so that no two prompts are alike.
    """
    if ids := work.get("prompt_ids"):
        return mx.array(text_prompt(ids, batch, tokens, repeat=repeat))
    seed = int(work["source"]["seed"])
    return mx.array(random_prompt(int(work["vocabulary"]), batch, tokens, seed=seed, repeat=repeat))


class Worker:
    """What both kinds of work share: the context, the source, and events."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.work = context.work
        self.source = Source.from_json(self.work["source"])
        self.settings = self.work["settings"]
        self.shapes = [Shape(*pair) for pair in self.work["shapes"]]
        self._steps = 0
        self._told = time.monotonic()

    def say(self, event: str, **fields: Any) -> None:
        """Emit an event."""
        self.context.emit({"event": event, **fields})

    def sometimes(self, event: str, **fields: Any) -> None:
        """Emit an event unless one was emitted so a moment ago: for loops of unknown speed."""
        now = time.monotonic()
        if now - self._told >= HEARTBEAT_SECONDS:
            self._told = now
            self.say(event, **fields)

    def begin(self, phase: str, strategies: list[str], shape: Shape | None = None) -> None:
        """Say what comes next, so that a rank that dies is known by what it was doing."""
        self.say("begin", phase=phase, strategies=strategies, shape=shape and [shape.batch, shape.context])

    def whole(self, dtype: str) -> nn.Module:
        """The whole model, unevaluated, with activations of `dtype`."""
        return load.lazy(replace(self.source, dtype=dtype))

    def clock(self) -> float:
        """`time.perf_counter`, counting as progress."""
        self._steps += 1
        return time.perf_counter()

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Tell of progress inside a timed loop: the number of steps, only when it has grown."""
        ended = threading.Event()

        def beat() -> None:
            told = self._steps
            while not ended.wait(HEARTBEAT_SECONDS):
                if self._steps != told:
                    told = self._steps
                    self.say("progress", steps=told)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def one_line(error: BaseException) -> str:
    """An exception's type and message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
