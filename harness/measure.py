"""Timing prefill and decode, as fast as mlx-lm's own loop, several strategies side by side.

    stream = Stream("tensor", model, cache, y)                 # y: the first token, from `prefill`
    for series in interleave([stream, other], steps=32, warmup=8): ...

mlx-lm's `generate_step` builds the next step and hands it over (`async_eval`) before it waits for the current one, so
that the device never waits for Python. `interleave` does just that, for a burst of a few steps of one stream, then of
the next: in each burst one step leads in, and one more is queued behind the last that is measured. With one stream it
is a single burst, mlx-lm's loop call for call. The order of streams rotates, so that none always follows the same other.

Why not step by step, with the next stream's step queued behind the current one? Because `async_eval` does not return
at once: MLX lets a few tasks of a stream wait (on a CPU, ten operations), so it comes back when the queued step is
nearly done, and the wait for the current one then ends at the wrong moment. Tried with two strategies that take 237 and
291 ms a step by themselves, it gave 285 and 273: each step's time had gone to its neighbour.

All ranks of a job run the same steps in the same order, as their collectives must meet: the order depends on nothing
but the number of streams, and nothing stops early (an end-of-sequence token is a token like any other).
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from harness.forward import PREFILL_STEP, cache_state, chunks
from harness.prompts import digest
from sharding.forward import logits_of, make_cache

Clock = Callable[[], float]

BURST = 4
"""Measured steps of one stream before the next one's turn."""

CLEAR_EVERY = 256
"""Steps between two releases of MLX's cache of buffers; mlx-lm's own number."""


@dataclass
class Stream:
    """One model in the middle of decoding. The loop moves `y`, the batch's latest tokens, shape (batch,)."""

    name: str
    model: nn.Module
    cache: list[Any]
    y: mx.array

    def __post_init__(self) -> None:
        if self.y.ndim != 1 or not self.y.size:
            raise ValueError(
                f"stream {self.name}: y must hold one token a sequence, not shape {self.y.shape}"
            )


@dataclass(frozen=True)
class Series:
    """Every step of one stream, in order.

    Attributes:
        name: the stream's.
        batch: sequences decoded together.
        warmup: seconds of the steps before measuring, kept to be looked at. The step that leads in to a burst has no
            completion before it and no time.
        seconds: seconds of each measured step (one token for each sequence).
        tokens_digest: of all tokens decoded; the same on every rank, or the ranks have parted.
    """

    name: str
    batch: int
    warmup: tuple[float, ...]
    seconds: tuple[float, ...]
    tokens_digest: str

    def __post_init__(self) -> None:
        if not self.seconds or any(not (math.isfinite(s) and s >= 0) for s in (*self.warmup, *self.seconds)):
            raise ValueError(f"{self.name}: step times must be given, finite and not negative")

    @property
    def tokens_per_second(self) -> float:
        """Decode rate of the whole batch: intervals over the time they took, (steps - 1) / (last - first)."""
        return self.batch * len(self.seconds) / sum(self.seconds)


@dataclass(frozen=True)
class Prefill:
    """Seconds to read a prompt, from the first call until the first token is there.

    Attributes:
        name: the model's.
        batch, tokens: the prompt's size.
        warmup, seconds: of each repeat, each with a prompt of its own and an empty cache.
    """

    name: str
    batch: int
    tokens: int
    warmup: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds or any(not (math.isfinite(s) and s >= 0) for s in (*self.warmup, *self.seconds)):
            raise ValueError(f"{self.name}: prefill times must be given, finite and not negative")


@functools.cache
def _compute_stream() -> Any:
    """Where the model computes: a stream of its own on the default device, as in mlx-lm."""
    make = getattr(mx, "new_thread_local_stream", mx.new_stream)
    return make(mx.default_device())


def rotation(streams: int, rounds: int) -> list[int]:
    """Whose turn it is: each round all of them once, each time starting one further."""
    if streams < 1 or rounds < 1:
        raise ValueError(f"{rounds} rounds of {streams} streams: both must be at least 1")
    return [(start + i) % streams for start in range(rounds) for i in range(streams)]


def step(model: nn.Module, cache: list[Any], y: mx.array) -> mx.array:
    """Build one decode step, without waiting: the greedy next tokens, shape (batch,), chosen on the device."""
    logits = logits_of(model(y[:, None], cache=cache))
    return mx.argmax(logits[:, -1, :], axis=-1)


def bursts(steps: int, burst: int) -> list[int]:
    """Sizes of the bursts that make up so many steps: equal ones, and what is left."""
    if steps < 1 or burst < 1:
        raise ValueError(f"{steps} steps in bursts of {burst}: both must be at least 1")
    return [min(burst, steps - start) for start in range(0, steps, burst)]


def interleave(
    streams: Sequence[Stream],
    steps: int,
    warmup: int,
    *,
    burst: int = BURST,
    clock: Clock = time.perf_counter,
) -> dict[str, Series]:
    """Decode with all streams in turn, a burst of steps each.

    Args:
        streams: with names that differ, all prefilled; their caches and tokens move on.
        steps: measured steps of each.
        warmup: steps of each before that, at the very shapes that are measured; at least one.
        burst: measured steps of one stream before the next one's turn; a single stream has just one burst.

    Returns:
        The times of each stream, by name, in the given order.
    """
    if warmup < 1:
        raise ValueError(f"{warmup} steps to warm up: there must be at least 1")
    if len({s.name for s in streams}) != len(streams):
        raise ValueError("two streams have the same name: " + ", ".join(s.name for s in streams))
    sizes = bursts(steps, burst if len(streams) > 1 else max(1, steps))
    times: list[list[float]] = [[] for _ in streams]
    tokens: list[list[mx.array]] = [[] for _ in streams]
    order = rotation(len(streams), len(sizes))
    with mx.stream(_compute_stream()):
        for turn, which in enumerate(order):
            number = turn // len(streams)
            count = sizes[number] + (warmup if number == 0 else 0)
            seconds, ys = _burst(streams[which], count, clock)
            times[which] += seconds
            tokens[which] += ys
            if turn + 1 < len(order):
                mx.clear_cache()
    return {
        stream.name: Series(
            stream.name,
            stream.y.size,
            tuple(seconds[:warmup]),
            tuple(seconds[warmup:]),
            digest(mx.stack(ys, axis=1)),
        )
        for stream, seconds, ys in zip(streams, times, tokens, strict=True)
    }


def _burst(stream: Stream, count: int, clock: Clock) -> tuple[list[float], list[mx.array]]:
    """`count` steps as mlx-lm runs them, after one that leads in and before one that is queued behind the last.

    Returns:
        The seconds of the steps, each from the completion before it, and the tokens of all steps.
    """
    queued: deque[mx.array] = deque()
    done: list[mx.array] = []
    times: list[float] = []

    def issue() -> None:
        stream.y = step(stream.model, stream.cache, stream.y)
        mx.async_eval(stream.y)
        queued.append(stream.y)

    issue()
    last = math.nan
    for n in range(count + 1):
        issue()
        y = queued.popleft()
        mx.eval(y)
        now = clock()
        if n:
            times.append(now - last)
        last = now
        done.append(y)
        if n and n % CLEAR_EVERY == 0:
            mx.clear_cache()
    mx.eval(queued[0])
    return times, [*done, queued.popleft()]


def abba(names: Sequence[str], repeats: int = 1) -> list[str]:
    """An order of blocks in which a steady drift hits all alike: there and back again, so many times."""
    if not names or repeats < 1:
        raise ValueError(f"{repeats} repeats of {len(names)} models: both must be at least 1")
    return [*names, *reversed(names)] * repeats


def blocks(
    builders: Mapping[str, Callable[[], Stream]],
    steps: int,
    warmup: int,
    *,
    repeats: int = 1,
    clock: Clock = time.perf_counter,
) -> dict[str, list[Series]]:
    """Decode with one model at a time, in ABBA order, for models that don't fit into memory together.

    Args:
        builders: make a model, prefilled; the name of the stream is the key's. A model is released before the next
            one is made, and made anew for each of its blocks.
        steps: measured steps of each block.
        warmup: steps before that, in each block.

    Returns:
        By name, the series of each of its blocks, in order.
    """
    result: dict[str, list[Series]] = {name: [] for name in builders}
    for name in abba(list(builders), repeats):
        stream = builders[name]()
        (series,) = interleave([stream], steps, warmup, clock=clock).values()
        result[name].append(series)
        del stream
        gc.collect()
        mx.clear_cache()
    return result


def prefill(
    model: nn.Module,
    cache: list[Any],
    prompt: mx.array,
    *,
    prefill_step: int = PREFILL_STEP,
    clock: Clock = time.perf_counter,
) -> tuple[mx.array, float]:
    """Read a prompt as mlx-lm does: in chunks, all but its last token, which is then a step by itself.

    So the vocabulary-sized logits are computed for one position only.

    Args:
        cache: empty.
        prompt: token ids, (batch, tokens).

    Returns:
        The first greedy tokens, shape (batch,), and the seconds until they were there.
    """
    pieces = list(chunks(prompt[:, :-1], prefill_step)) if prompt.shape[1] > 1 else []
    final = prompt[:, -1]
    mx.eval(prompt, final, *pieces)
    with mx.stream(_compute_stream()):
        start = clock()
        for piece in pieces:
            model(piece, cache=cache)
            mx.eval(cache_state(cache))
            mx.clear_cache()
        y = step(model, cache, final)
        mx.eval(y)
        return y, clock() - start


def prefills(
    models: Mapping[str, nn.Module],
    prompts: Sequence[mx.array],
    warmup: int = 1,
    *,
    prefill_step: int = PREFILL_STEP,
    clock: Clock = time.perf_counter,
) -> tuple[dict[str, Prefill], dict[str, Stream]]:
    """Time the prefill of several models side by side: for each prompt all of them, each time starting one further.

    Args:
        models: by name.
        prompts: one for each repeat, all of one shape, with first tokens that differ (`prompts.random_prompt` with
            `repeat`), each read into an empty cache.
        warmup: repeats that come first and are kept apart; at least one.

    Returns:
        The times, and streams that go on from the last prompt, ready for `interleave`.
    """
    if warmup < 1 or len(prompts) <= warmup:
        raise ValueError(
            f"{len(prompts)} prompts, {warmup} of them to warm up: at least one of each is needed"
        )
    if len({tuple(p.shape) for p in prompts}) != 1:
        raise ValueError("the prompts differ in shape, so their times can't be compared")
    names = list(models)
    times: dict[str, list[float]] = {name: [] for name in names}
    streams: dict[str, Stream] = {}
    for n, which in enumerate(rotation(len(names), len(prompts))):
        name, prompt = names[which], prompts[n // len(names)]
        streams.pop(name, None)  # its cache goes before the next one grows
        cache = make_cache(models[name])
        y, seconds = prefill(models[name], cache, prompt, prefill_step=prefill_step, clock=clock)
        times[name].append(seconds)
        streams[name] = Stream(name, models[name], cache, y)
    batch, length = prompts[0].shape
    results = {n: Prefill(n, batch, length, tuple(t[:warmup]), tuple(t[warmup:])) for n, t in times.items()}
    return results, {name: streams[name] for name in names}
