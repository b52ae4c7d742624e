"""Rows of `plan`: published models at full size, and small ones against what ranks really hold and do."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import pytest

from sharding import load, lockstep, rows, strategies, trace
from sharding.placement import Collective
from sharding.plan import Reading
from sharding.source import Source
from sharding.tree import parameters_of
from tests.sharding import small


def plan(
    source: Source,
    names: list[str],
    ranks: list[int],
    batches: tuple[int, ...] = (1,),
    contexts: tuple[int, ...] = (8,),
    memory: int | None = None,
) -> list[rows.Row]:
    """Rows of several strategies."""
    found = [strategies.resolve(name, source.model_type) for name in names]
    return rows.make_rows(source, found, ranks, batches, contexts, memory)


@pytest.mark.parametrize(
    ("name", "parameters", "quantize"),
    [
        ("DeepSeek-V4-Flash", 284_334_567_511, "mxfp8"),
        ("DeepSeek-V4-Pro", 1_572_999_528_803, None),
        ("Llama-3.1-8B", 8_030_261_248, None),
        ("Llama-3.1-8B", 8_030_261_248, "4bit"),
        ("Qwen3-8B", 8_190_735_360, "mxfp4"),
        ("SmolLM2-135M", 134_515_008, "8bit"),
    ],
)
def test_parameter_counts_of_published_models(name, parameters, quantize):
    """A plan counts the parameters that a release has, however they are stored."""
    (row,) = plan(small.published(name, quantize=quantize), ["tensor"], [1])
    assert row.valid
    assert row.parameters == parameters


@pytest.fixture(scope="module")
def flash() -> dict[tuple[str, int], rows.Row]:
    """The plan of V4-Flash by strategy and world size; made without touching a weight."""
    source = small.published("DeepSeek-V4-Flash", dtype="bfloat16")
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = plan(source, [*small.V4_STRATEGIES, "upstream"], [2]) + plan(source, ["tensor"], [1, 3, 16])
    assert mx.get_peak_memory() - before < 2**20
    assert mx.get_active_memory() - before < 2**20
    return {(row.strategy, row.ranks): row for row in found}


@pytest.mark.parametrize("ranks", [3, 16])
def test_flash_is_refused_with_the_reason_in_words(flash, ranks):
    """8 output groups do not divide by 3 or by 16 ranks; the row says so and has no figures."""
    row = flash["tensor", ranks]
    assert not row.valid
    assert any(f"8 output groups do not divide by {ranks} ranks" in reason for reason in row.reasons)
    assert row.collectives_per_token is row.bytes_per_token is row.fits is None
    assert row.weight_bytes_per_rank == row.cache_bytes_per_rank == ()


def test_collectives_and_bytes_of_flash(flash):
    """43 layers, two sums each: of the hidden size, or once of all groups' ranks; bytes in bfloat16."""
    ranks, hidden, groups = 2, 4096, 8 * 1024
    expected = {
        "tensor": ({"all_sum": 86}, 86 * hidden),
        "replicated-wo_b": ({"all_sum": 86}, 43 * (hidden + groups)),
        "replicated-wo_b-late": ({"all_sum": 86}, 86 * hidden),
        "gathered-wo_b": ({"all_sum": 86, "all_gather": 43}, 43 * (hidden + groups + hidden // ranks)),
        "upstream": ({"all_sum": 86}, 86 * hidden),
    }
    for strategy, (counts, elements) in expected.items():
        row = flash[strategy, ranks]
        assert row.valid, row.reasons
        assert row.collectives_per_token == counts
        assert row.bytes_per_token == elements * 2
        assert row.traced == (strategy == "upstream")


def test_upstream_has_the_figures_of_our_late_strategy(flash):
    """A trace of foreign code and a table that splits alike give the same bytes, rank by rank."""
    ours, theirs = flash["replicated-wo_b-late", 2], flash["upstream", 2]
    for field in (
        "weight_bytes_per_rank",
        "replicated_weight_bytes_per_rank",
        "weight_bytes_read_per_token",
        "cache_bytes_per_rank",
        "load_peak_bytes_per_rank",
        "bytes_per_token",
    ):
        assert getattr(ours, field) == getattr(theirs, field), field


def test_one_rank_of_flash_asks_for_nothing(flash):
    """The unsplit model has no collectives and nothing replicated."""
    row = flash["tensor", 1]
    assert row.collectives_per_token == {}
    assert row.bytes_per_token == 0
    assert row.replicated_weight_bytes_per_rank == (0,)
    assert flash["tensor", 2].weight_bytes_per_rank[0] > row.weight_bytes_per_rank[0] / 2


def test_smollm_is_refused_for_two_ranks_and_planned_for_three():
    """9 heads and 3 key/value heads."""
    two, three = plan(small.published("SmolLM2-135M"), ["tensor"], [2, 3])
    assert not two.valid
    assert any("9 heads do not divide by 2 ranks" in reason for reason in two.reasons)
    assert three.valid
    assert three.collectives_per_token == {"all_sum": 60}


CASES: list[tuple[dict[str, Any], str | None, str, int, str]] = [
    (small.BIASED, None, "tensor", 2, "float32"),
    (small.LLAMA, "4bit", "tensor", 4, "bfloat16"),
    (small.TIED, None, "upstream", 2, "float16"),
    (small.MISTRAL, None, "tensor", 2, "float32"),
    (small.QWEN3, "mxfp4", "upstream", 2, "float32"),
    *((small.V4_WIDE, "4bit", strategy, 2, "float32") for strategy in (*small.V4_STRATEGIES, "upstream")),
    *((small.V4, None, strategy, 4, "bfloat16") for strategy in small.V4_STRATEGIES),
]


@pytest.mark.parametrize(("config", "quantize", "strategy", "ranks", "dtype"), CASES)
def test_rows_are_what_ranks_hold(config, quantize, strategy, ranks, dtype):
    """Weight bytes are those of every rank's arrays after splitting, to the byte, whoever splits."""
    source = small.resolve(config, quantize=quantize, dtype=dtype)
    (row,) = plan(source, [strategy], [ranks])
    assert row.valid, row.reasons
    found = strategies.resolve(strategy, source.model_type)
    held = lockstep.run(
        ranks,
        lambda group: sum(a.nbytes for a in parameters_of(found.apply(load.lazy(source), group)).values()),
    )
    assert row.weight_bytes_per_rank == tuple(held)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("config", "strategy", "context"),
    [
        (small.LLAMA, "tensor", 9),
        (small.LLAMA, "upstream", 300),
        (small.MISTRAL, "tensor", 9),
        (small.V4, "tensor", 9),
        (small.V4, "upstream", 140),
        (small.V4, "gathered-wo_b", 140),
    ],
)
def test_cache_bytes_are_those_of_real_caches(config, strategy, batch, context):
    """Each rank's cache has the planned bytes after a prefill of `context` tokens and one decode step."""
    source = small.resolve(config)
    (row,) = plan(source, [strategy], [2], (batch,), (context,))
    found = strategies.resolve(strategy, source.model_type)

    def work(group):
        model = found.apply(load.lazy(source), group)
        cache = small.make_cache(model)
        for count in (context, 1):
            mx.eval(small.logits_of(model(small.tokens(count, batch), cache=cache)))
        return sum(array.nbytes for array in trace.arrays_in(cache))

    assert row.cache_bytes_per_rank == tuple(lockstep.run(2, work))


def test_every_combination_has_its_row():
    """Strategies outermost, then ranks, batches and contexts, in the order asked for."""
    source = small.resolve(small.LLAMA)
    found = plan(source, ["upstream", "tensor"], [4, 1], (2, 1), (16, 8))
    asked = [(s, n, b, c) for s in ("upstream", "tensor") for n in (4, 1) for b in (2, 1) for c in (16, 8)]
    assert [(r.strategy, r.ranks, r.batch, r.context) for r in found] == asked
    for row in found:
        assert row.valid
        for field in ("weight_bytes_per_rank", "weight_bytes_read_per_token", "cache_bytes_per_rank"):
            assert len(getattr(row, field)) == row.ranks


def test_bytes_grow_with_batch_and_context_as_they_should():
    """Payload is in proportion to the batch, weights to nothing; the cache grows with both."""
    source = small.resolve(small.LLAMA)
    one, four = plan(source, ["tensor"], [2], (1, 4), (512,))
    assert one.bytes_per_token is not None
    assert four.bytes_per_token == 4 * one.bytes_per_token
    assert four.collectives_per_token == one.collectives_per_token
    assert four.weight_bytes_per_rank == one.weight_bytes_per_rank
    assert four.cache_bytes_per_rank[0] == 4 * one.cache_bytes_per_rank[0]
    (deep,) = plan(source, ["tensor"], [2], (1,), (2048,))
    assert deep.cache_bytes_per_rank > one.cache_bytes_per_rank


def test_key_value_heads_are_shared_out_and_latents_are_not():
    """llama's cache is halved by two ranks, V4's latent cache is whole on each."""
    for config, divisor in ((small.LLAMA, 2), (small.V4, 1)):
        one, two = plan(small.resolve(config), ["tensor"], [1, 2])
        assert two.cache_bytes_per_rank == (one.cache_bytes_per_rank[0] // divisor,) * 2


def test_a_row_that_does_not_fit_says_what_is_missing():
    """Against a host's memory: it fits, or the row names the rank and what it needs and has."""
    source = small.published("Llama-3.1-8B", dtype="bfloat16")
    memory = 12 * 2**30
    one, two = plan(source, ["tensor"], [1, 2], memory=memory)
    assert (one.valid, one.fits, two.fits) == (True, False, True)
    (line,) = one.reasons
    assert line.startswith("rank 0 needs 15.0 GiB")
    assert line.endswith("a host has 12.0 GiB")
    (deep,) = plan(source, ["tensor"], [2], (16,), (32768,), memory)
    assert deep.fits is False
    assert "cache 32" in deep.reasons[0]
    (unknown,) = plan(source, ["tensor"], [1])
    assert unknown.fits is None


def test_a_row_is_plain_data():
    """Rows go to JSON with every field of the contract."""
    (row,) = plan(small.resolve(small.LLAMA, quantize="mxfp4"), ["tensor"], [2])
    data = json.loads(json.dumps(row.to_json()))
    assert {
        "model_type", "family", "strategy", "ranks", "batch", "context", "dtype", "quantization", "valid", "reasons",
        "parameters", "collectives_per_token", "bytes_per_token", "weight_bytes_per_rank",
        "replicated_weight_bytes_per_rank", "weight_bytes_read_per_token", "cache_bytes_per_rank", "fits",
    } <= data.keys()  # fmt: skip
    assert (data["family"], data["quantization"], data["dtype"]) == ("llama", "mxfp4", "float32")


def test_a_table_that_disagrees_with_its_trace_is_an_error(monkeypatch):
    """Tables answer, tracing proves: a table that forgets a sum, or gets its width wrong, is found out."""
    source = small.resolve(small.LLAMA)
    real = Reading.plan

    def forgetful(self, ranks):
        plan = real(self, ranks)
        object.__setattr__(plan, "collectives", plan.collectives[1:])
        return plan

    monkeypatch.setattr(Reading, "plan", forgetful)
    with pytest.raises(rows.TableError, match="the table says"):
        plan(source, ["tensor"], [2])

    def wide(self, ranks):
        plan = real(self, ranks)
        more = Collective("all_sum", plan.collectives[0].features + 1, "x")
        object.__setattr__(plan, "collectives", (more, *plan.collectives[1:]))
        return plan

    monkeypatch.setattr(Reading, "plan", wide)
    with pytest.raises(rows.TableError, match="the trace"):
        plan(source, ["tensor"], [2])


@pytest.mark.parametrize("config", [small.LLAMA, small.V4])
def test_an_empty_context_is_planned(config):
    """Decoding into an empty cache is a plan like any other: the cache is that of one step."""
    (row,) = plan(small.resolve(config), ["tensor"], [2], contexts=(0,))
    assert row.valid


def test_a_model_that_can_not_run_is_a_refused_row():
    """A config whose model builds and can't run, such as 6 heads in 4 groups, gives a reason and no exception."""
    source = small.resolve({**small.V4, "num_attention_heads": 6})
    for row in plan(source, ["tensor", "gathered-wo_b"], [1, 2]):
        assert not row.valid
