"""The decode loop keeps the device busy as mlx-lm's does, and gives each stream the time of its own steps."""

from __future__ import annotations

import gc
import statistics
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from harness import measure
from harness.measure import Series, Stream, abba, blocks, interleave, prefill, prefills, rotation
from harness.prompts import digest, random_prompt
from sharding.forward import make_cache
from tests.harness.small_models import VOCABULARY, deepseek_v4, llama

PROMPT = mx.array(random_prompt(VOCABULARY, 1, 11, seed=0))


def stream(name: str = "a", seed: int = 0, prompt: mx.array = PROMPT, model: Any = None) -> Stream:
    model = model or llama(seed)
    cache = make_cache(model)
    y, _ = prefill(model, cache, prompt)
    return Stream(name, model, cache, y)


def greedy(model: Any, prompt: mx.array, steps: int) -> list[int]:
    """Plain decoding without a cache or a loop worth the name."""
    tokens = prompt
    for _ in range(steps):
        logits = model(tokens)
        tokens = mx.concatenate([tokens, mx.argmax(logits[:, -1:], axis=-1).astype(tokens.dtype)], axis=1)
    return [int(t) for t in np.array(tokens[0, prompt.shape[1] :])]


class Repeated(nn.Module):
    """A model that does its work so many times over."""

    def __init__(self, model: nn.Module, times: int) -> None:
        super().__init__()
        self.model, self.times = model, times

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        extra = sum((self.model(tokens) for _ in range(self.times)), mx.zeros(1))
        return self.model(tokens, cache=cache) + 0 * extra


class Log:
    """Replaces mx.eval and mx.async_eval by ones that note what was asked, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        for name in ("eval", "async_eval"):
            monkeypatch.setattr(mx, name, self._noting(name, getattr(mx, name)))

    def _noting(self, name: str, original: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any) -> None:
            self.events.append(name)
            original(*args)

        return noted


def test_the_tokens_are_those_of_plain_decoding():
    """Alone or beside others, a stream decodes exactly what its model decodes."""
    expected = greedy(llama(), PROMPT, 19)
    alone = interleave([stream()], steps=8, warmup=4)["a"]
    assert alone.tokens_digest == digest([expected[1:15]])  # with the steps that lead in and out
    together = interleave([stream(), stream("b", seed=1), stream("c", seed=2)], steps=8, warmup=4, burst=4)
    assert together["a"].tokens_digest == digest([expected[1:17]])
    assert together["b"].tokens_digest != alone.tokens_digest


def test_the_next_step_is_handed_over_before_the_current_one_is_waited_for(monkeypatch):
    """One hand-over ahead, always: the device has work while Python waits; and one wait a step, no more."""
    streams = [stream(), stream("b", seed=1)]
    log = Log(monkeypatch)
    interleave(streams, steps=5, warmup=1, burst=3)
    # Bursts of 3 + 1, 3 + 1, 2 and 2 measured steps, each after one that leads in and before one behind the last.
    counts = (4, 4, 2, 2)
    expected = [["async_eval", *["async_eval", "eval"] * (count + 1), "eval"] for count in counts]
    assert log.events == [event for burst in expected for event in burst]


def test_one_stream_asks_no_more_of_the_device_than_mlx_lm(monkeypatch):
    """Step for step: one asynchronous evaluation and one wait, where mlx-lm's generate_step has the same."""
    from mlx_lm.generate import generate_step

    steps = 10
    one = stream()
    log = Log(monkeypatch)
    interleave([one], steps=steps - 2, warmup=1)
    ours = list(log.events)
    log.events.clear()
    generator = generate_step(PROMPT[0], one.model, max_tokens=steps)
    waits = 0
    for token, _ in generator:
        assert isinstance(token, int)  # mlx-lm waits by `item`, once a token
        waits += 1
    assert ours.count("async_eval") == steps + 1  # the last one's successor, which is not measured
    assert (
        log.events.count("async_eval") - 1 == steps
    )  # one more for the prompt's own token, which `prefill` did
    assert ours.count("eval") == steps + 1 == waits + 1


def test_a_steps_time_is_that_of_its_own_stream():
    """With a clock of our own, a step took the time from the completion before it in the same burst."""
    ticks = iter(float(n * n) for n in range(100))
    result = interleave(
        [stream(), stream("b", seed=1)], steps=3, warmup=1, burst=2, clock=lambda: next(ticks)
    )
    # Completions, by bursts a b | b a, at times 0 1 4 9, 16 25 36 49 | 64 81, 100 121: the first of each leads in.
    assert (result["a"].warmup, result["a"].seconds) == ((1.0,), (3.0, 5.0, 21.0))
    assert (result["b"].warmup, result["b"].seconds) == ((9.0,), (11.0, 13.0, 17.0))


def test_slow_and_fast_streams_keep_their_own_times():
    """A stream that is many times slower than its neighbour is so in its own figures, whatever is queued behind it.

    Queueing one stream's step behind another's had their times mixed, since handing a step over waits for the one
    before it.
    """
    slow = Stream("slow", Repeated(llama(), 12), make_cache(llama()), mx.array([3]))
    fast = Stream("fast", llama(), make_cache(llama()), mx.array([3]))
    result = interleave([slow, fast], steps=12, warmup=4, burst=4)
    assert statistics.median(result["slow"].seconds) > 3 * statistics.median(result["fast"].seconds)


def test_the_rate_counts_intervals_and_not_tokens():
    """n intervals in t seconds are n / t steps a second, times the batch; two tokens don't make it twice as fast."""
    assert Series("a", 1, (), (0.5,), "").tokens_per_second == 2
    assert Series("a", 16, (9.0,), (0.5, 0.3), "").tokens_per_second == pytest.approx(40)


def test_every_sample_is_kept():
    """As many times as steps, warm-up apart."""
    result = interleave([stream(), stream("b", seed=1)], steps=5, warmup=3)
    assert [len(s.seconds) for s in result.values()] == [5, 5]
    assert [len(s.warmup) for s in result.values()] == [3, 3]
    assert list(result) == ["a", "b"]


def test_each_stream_comes_first_equally_often():
    """The order starts one further each round, and nothing but the number of streams decides it."""
    assert rotation(3, 3) == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert rotation(1, 4) == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="at least 1"):
        rotation(0, 3)


def test_a_batch_decodes_as_one():
    """Several sequences step together, each with its own token, and count as many tokens."""
    prompt = mx.array(random_prompt(VOCABULARY, 3, 11, seed=0))
    series = interleave([stream(prompt=prompt)], steps=4, warmup=2)["a"]
    rows = [greedy(llama(), prompt[i : i + 1], 9)[1:] for i in range(3)]
    assert series.batch == 3
    assert series.tokens_digest == digest(rows)


def test_models_that_return_objects_are_measured_alike():
    """mlx-vlm's models return an object with logits in it, have a cache of their own, and decode the same way."""
    model = deepseek_v4()
    series = interleave([stream(model=model)], steps=3, warmup=1)["a"]
    assert len(series.seconds) == 3


def test_bad_requests_are_refused():
    """No warm-up, no steps, equal names or tokens of another shape are errors before anything runs."""
    for steps, warmup in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            interleave([stream()], steps, warmup)
    with pytest.raises(ValueError, match="same name"):
        interleave([stream(), stream()], 1, 1)
    with pytest.raises(ValueError, match="one token a sequence"):
        Stream("a", llama(), [], mx.zeros((1, 1)))
    with pytest.raises(ValueError, match="finite and not negative"):
        Series("a", 1, (), (float("nan"),), "")


def test_a_prefill_reads_all_but_the_last_token_in_chunks():
    """The prompt goes through in pieces of the step size, its last token alone, so that one row of logits is made."""
    seen: list[tuple[int, ...]] = []
    model = llama()
    original = type(model).__call__

    class Seen(type(model)):  # type: ignore[misc]
        def __call__(self, tokens: mx.array, **kwargs: Any) -> mx.array:
            seen.append(tokens.shape)
            result: mx.array = original(self, tokens, **kwargs)
            return result

    object.__setattr__(model, "__class__", Seen)
    y, seconds = prefill(model, make_cache(model), PROMPT, prefill_step=4)
    assert seen == [(1, 4), (1, 4), (1, 2), (1, 1)]
    assert seconds > 0
    assert y.tolist() == greedy(llama(), PROMPT, 1)


def test_a_prompt_of_one_token_is_a_step():
    """The shortest prompt has nothing to read before its last token."""
    y, _ = prefill(llama(), make_cache(llama()), PROMPT[:, :1])
    assert y.tolist() == greedy(llama(), PROMPT[:, :1], 1)


def test_a_prefills_time_ends_when_its_token_is_there(monkeypatch):
    """The clock is read before anything is asked for, and again only after the token was waited for."""
    model = llama()
    log = Log(monkeypatch)

    def clock() -> float:
        log.events.append("clock")
        return float(len(log.events))

    prefill(model, make_cache(model), PROMPT, clock=clock)
    assert log.events == ["eval", "clock", "eval", "eval", "clock"]


def test_prefills_are_interleaved_and_go_on_as_streams():
    """All models read each prompt, rotating; warm-up is kept apart; the streams decode on from the last prompt."""
    prompts = [mx.array(random_prompt(VOCABULARY, 2, 9, seed=0, repeat=r)) for r in range(4)]
    times, streams = prefills({"a": llama(), "b": llama(1)}, prompts, warmup=1)
    assert [(t.batch, t.tokens, len(t.warmup), len(t.seconds)) for t in times.values()] == [(2, 9, 1, 3)] * 2
    decoded = interleave(list(streams.values()), steps=2, warmup=1)
    rows = [greedy(llama(), prompts[-1][i : i + 1], 6)[1:] for i in range(2)]
    assert decoded["a"].tokens_digest == digest(rows)
    for bad, match in ((prompts[:1], "to warm up"), ([prompts[0], PROMPT], "differ in shape")):
        with pytest.raises(ValueError, match=match):
            prefills({"a": llama()}, bad)


def test_blocks_hold_one_model_at_a_time_in_abba_order():
    """There and back again, each model released before the next is made."""
    assert abba(["a", "b", "c"]) == ["a", "b", "c", "c", "b", "a"]
    made: list[tuple[str, int]] = []
    alive: list[weakref.ref[Any]] = []

    def builder(name: str, seed: int) -> Callable[[], Stream]:
        def build() -> Stream:
            gc.collect()
            made.append((name, sum(ref() is not None for ref in alive)))
            result = stream(name, seed)
            alive.append(weakref.ref(result.model))
            return result

        return build

    result = blocks({"a": builder("a", 0), "b": builder("b", 1)}, steps=3, warmup=1)
    assert made == [("a", 0), ("b", 0), ("b", 0), ("a", 0)]
    assert [len(s.seconds) for s in result["a"]] == [3, 3]
    assert result["a"][0].tokens_digest == result["a"][1].tokens_digest


def test_buffers_are_released_as_often_as_mlx_lm_does(monkeypatch):
    """MLX's cache of buffers is cleared every 256 steps of a burst, as mlx-lm does, and never in the first."""
    cleared: list[int] = []
    monkeypatch.setattr(measure, "CLEAR_EVERY", 4)
    one = stream()
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    interleave([one], steps=6, warmup=1)
    assert len(cleared) == 1
