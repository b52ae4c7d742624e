"""Traces: what a decode step asks for, found without weights or ranks, and equal to what real ranks ask for."""

from __future__ import annotations

import mlx.core as mx
import pytest

from sharding import load, lockstep, strategies, trace
from sharding.source import Source
from sharding.trace import StandInGroup
from tests.sharding import small

CASES = [
    (small.LLAMA, "tensor"),
    (small.LLAMA, "upstream"),
    (small.QWEN3, "tensor"),
    *((small.V4, strategy) for strategy in (*small.V4_STRATEGIES, "upstream")),
]


def traced(source: Source, strategy: str, ranks: int = 2, batch: int = 1, rank: int = 0) -> trace.StepTrace:
    """The trace of one decode step."""
    group = StandInGroup(rank, ranks)
    with trace.tracing(group) as recording:
        model = strategies.resolve(strategy, source.model_type).apply(
            load.lazy(source, values=False), group, evaluate=False
        )
        return trace.trace_step(model, recording, batch)


@pytest.mark.parametrize(("config", "strategy"), CASES)
def test_a_trace_is_what_ranks_really_ask_for(config, strategy, monkeypatch):
    """Kinds, shapes and dtypes of a traced step are those at which ranks in lockstep meet while they decode."""
    source = small.resolve(config)
    met: list[tuple[str, tuple[int, ...], str]] = []
    reduce = lockstep._reduce

    def noting(asked):
        kind, array = asked[0]
        met.append((kind, tuple(array.shape), str(array.dtype).removeprefix("mlx.core.")))
        return reduce(asked)

    monkeypatch.setattr(lockstep, "_reduce", noting)
    found = strategies.resolve(strategy, source.model_type)
    steps = []

    def work(group):
        model = found.apply(load.lazy(source), group)
        cache = small.make_cache(model)
        for count in (9, 1):
            before = len(met)
            mx.eval(small.logits_of(model(small.tokens(count, 3), cache=cache)))
            steps.append(met[before:])

    lockstep.run(2, work)
    decode = steps[-1]
    assert decode
    assert [(c.kind, c.shape, c.dtype) for c in traced(source, strategy, batch=3).calls] == decode


@pytest.mark.parametrize(("config", "strategy"), CASES)
def test_every_rank_has_the_same_trace(config, strategy):
    """Shares are equal, so each rank asks for the same."""
    source = small.resolve(config)
    assert traced(source, strategy, rank=0).calls == traced(source, strategy, rank=1).calls


@pytest.mark.parametrize(
    ("name", "sums"),
    [("DeepSeek-V4-Flash", 86), ("DeepSeek-V4-Pro", 122), ("Llama-3.1-8B", 64), ("Qwen3-8B", 72)],
)
def test_upstreams_split_of_published_models(name, sums):
    """Two sums a layer, at full size and without touching a weight."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    step = traced(small.published(name), "upstream")
    assert step.counts() == {"all_sum": sums}
    assert mx.get_peak_memory() - before < 2**20


def test_the_payload_grows_with_the_batch():
    """Bytes a step are those of one token times the batch."""
    source = small.resolve(small.V4)
    one, four = (traced(source, "gathered-wo_b", batch=batch).payload() for batch in (1, 4))
    assert four == 4 * one > 0


def test_stand_ins_answer_with_the_shapes_of_the_real_ones():
    """Each collective gives what N ranks would give, and notes what this rank hands in."""
    x = mx.zeros((4, 6), mx.float16)
    with trace.tracing(StandInGroup(1, 2)) as recording:
        shapes = [
            mx.distributed.all_sum(x).shape,
            mx.distributed.all_max(x, group=None).shape,
            mx.distributed.all_min(x).shape,
            mx.distributed.all_gather(x).shape,
            mx.distributed.all_gather(mx.array(1.0)).shape,
            mx.distributed.sum_scatter(x).shape,
            mx.distributed.send(x, 0).shape,
            mx.distributed.recv((3, 2), mx.int32, 0).shape,
            mx.distributed.recv_like(x, 0).shape,
        ]
        world = mx.distributed.init()
    assert shapes == [(4, 6), (4, 6), (4, 6), (8, 6), (2,), (2, 6), (4, 6), (3, 2), (4, 6)]
    assert (world.rank(), world.size()) == (1, 2)
    assert recording.counts() == {
        "all_sum": 1, "all_max": 1, "all_min": 1, "all_gather": 2, "sum_scatter": 1, "send": 1, "recv": 1, "recv_like": 1,
    }  # fmt: skip
    assert recording.payload() == 7 * x.nbytes + 4 + 24
    assert (recording.calls[0].dtype, recording.calls[7].dtype) == ("float16", "int32")


def test_tracing_puts_everything_back():
    """Also when the traced code raises, mx and mx.distributed are as they were."""
    names = [*trace.KINDS, "init"]
    before = [getattr(mx.distributed, name) for name in names], mx.eval, mx.async_eval
    with pytest.raises(KeyError), trace.tracing(StandInGroup(0, 2)):
        raise KeyError("lost")
    assert ([getattr(mx.distributed, name) for name in names], mx.eval, mx.async_eval) == before


def test_tracing_evaluates_nothing():
    """Code that evaluates on the way, in any of the usual ways, allocates nothing."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with trace.tracing(StandInGroup(0, 2)):
        x = mx.ones((1024, 1024))
        mx.eval(x)
        mx.async_eval(x)
    assert mx.get_peak_memory() - before < 2**20


def test_counting_notes_real_calls_and_still_does_them():
    """On real ranks (one, here) every call is noted and gives its real result."""
    x = mx.arange(4)
    with trace.counting() as recording:
        assert mx.array_equal(mx.distributed.all_sum(x), x).item()
        assert mx.array_equal(mx.distributed.all_gather(x), x).item()
    assert [(c.kind, c.shape, c.dtype, c.nbytes) for c in recording.calls] == [
        ("all_sum", (4,), "int32", 16),
        ("all_gather", (4,), "int32", 16),
    ]
    mx.distributed.all_sum(x)
    assert len(recording.calls) == 2


def test_calls_hidden_in_compiled_functions_are_seen():
    """A collective inside a function that was compiled before is recorded in every step."""

    @mx.compile
    def summed(x):
        return mx.distributed.all_sum(x) + 1

    mx.eval(summed(mx.zeros(3)))
    with trace.tracing(StandInGroup(0, 2)) as recording:
        for _ in range(3):
            summed(mx.zeros(3))
    assert recording.counts() == {"all_sum": 3}


def test_arrays_are_found_wherever_a_cache_keeps_them():
    """Lists, tuples, dictionaries and attributes are searched, in a fixed order."""

    class Holder:
        def __init__(self) -> None:
            self.a = [mx.zeros(1), (mx.zeros(2), None)]
            self.b = {"x": mx.zeros(3), "n": 4}

    assert [array.size for array in trace.arrays_in([Holder(), mx.zeros(4)])] == [1, 2, 3, 4]
