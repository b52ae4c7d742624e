"""The faults of real sharding code, put back in one at a time: each must be seen, far above a correct split.

Most are mutations of a family's table, so that exactly one thing is wrong; the rest harm a split model. A fault that
raises is seen as well, and the test says that it raises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from sharding import apply, collectives, load, lockstep
from sharding.placement import (
    IN,
    OUT,
    STACK,
    Block,
    Placement,
    Reduce,
    Split,
    column,
    heads,
    replicated,
    row,
    stacked,
    vector,
)
from sharding.source import Source
from sharding.tree import at, parameters_of
from tests.sharding import small
from tests.sharding.wrong import AddsSharedAfterwards, AtRankZero, Nothing, OnEveryRank

V4 = small.resolve(small.V4)
V4_BIASED = small.resolve(small.V4_BIASED)
LLAMA = small.resolve(small.LLAMA)
BIASED = small.resolve(small.BIASED)
V4_QUANTISED = small.resolve(small.V4_WIDE, quantize="4bit")
Harm = Callable[[nn.Module, Any], None]


def table(source: Source, strategy: str, places: Mapping[str, Placement], **changes: Any) -> list[Block]:
    """A strategy's table with other placements for the entries named, and other fields in their blocks."""
    blocks = []
    touched: set[str] = set()
    for block in small.table_of(source, strategy):
        own = {name: rule for name, rule in places.items() if name in block.places}
        touched |= own.keys()
        extra = changes if own else {}
        blocks.append(dataclasses.replace(block, places={**block.places, **own}, **extra))
    assert touched == places.keys()
    return blocks


def outputs(source: Source, blocks: list[Block], ranks: int = 2, harm: Harm | None = None) -> list[mx.array]:
    """Logits of every rank of a model split by a table and then harmed."""
    plan = small.plan_of(source, blocks, ranks)

    def work(group: Any) -> mx.array:
        model = apply.shard(load.lazy(source), plan, group)
        if harm is not None:
            harm(model, group)
        return small.logits(model, (9, 1))

    return lockstep.run(ranks, work)


def seen(source: Source, blocks: list[Block], ranks: int = 2, harm: Harm | None = None) -> None:
    """Assert that the ranks run to the end and are far off."""
    assert small.distance(outputs(source, blocks, ranks, harm), source, (9, 1)) > small.VISIBLE


def interleaved(axis: int, units: str | None, runs: str, reduce: tuple[Reduce, ...] = ()) -> Split:
    """A split that takes a share of every run."""
    return Split(axis=axis, units=units, runs=runs, reduce=reduce)


def test_the_tables_without_a_fault_are_not_seen():
    """The yardstick itself: an unchanged table run this way is right, and each fault below is 100 times as far off."""
    for source, strategy in ((V4, "tensor"), (V4_BIASED, "gathered-wo_b"), (BIASED, "tensor")):
        result = outputs(source, table(source, strategy, {}))
        assert small.distance(result, source, (9, 1)) <= small.TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "places"),
    [
        pytest.param(
            "replicated-wo_b", {"attn_sink": vector("n_heads")}, id="contiguous sinks, interleaved heads"
        ),
        pytest.param(
            "tensor", {"attn_sink": vector("n_heads", "o_groups")}, id="interleaved sinks, contiguous heads"
        ),
        pytest.param(
            "tensor", {"attn_sink": AtRankZero(axis=IN, units="n_heads")}, id="sinks of rank 0 everywhere"
        ),
        pytest.param(
            "replicated-wo_b",
            {"attn_sink": AtRankZero(axis=IN, units="n_heads", runs="o_groups")},
            id="sinks of rank 0, interleaved",
        ),
        pytest.param(
            "replicated-wo_b",
            {"wq_b": heads("n_heads"), "attn_sink": vector("n_heads")},
            id="contiguous heads where every rank has all groups",
        ),
        pytest.param(
            "tensor",
            {"wq_b": heads("n_heads", "o_groups"), "attn_sink": vector("n_heads", "o_groups")},
            id="interleaved heads where a rank has whole groups",
        ),
        pytest.param(
            "tensor",
            {"wo_a": AtRankZero(axis=STACK, units="o_groups")},
            id="output groups of rank 0 everywhere",
        ),
        pytest.param(
            "tensor",
            {"wo_b": AtRankZero(axis=IN, units="o_groups")},
            id="inputs of wo_b from rank 0 everywhere",
        ),
        pytest.param(
            "tensor", {"switch_mlp.down_proj": AtRankZero(axis=IN)}, id="expert inputs of rank 0 everywhere"
        ),
        pytest.param(
            "tensor", {"switch_mlp.up_proj": AtRankZero(axis=OUT)}, id="expert outputs of rank 0 everywhere"
        ),
        pytest.param(
            "tensor",
            dict.fromkeys(
                ("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"), replicated
            ),
            id="a whole shared expert on every rank, summed",
        ),
        pytest.param(
            "tensor",
            {"shared_experts.down_proj": row(reduce=("sum_output",))},
            id="shared experts summed twice",
        ),
        pytest.param(
            "tensor",
            {
                "switch_mlp.gate_proj": replicated,
                "switch_mlp.up_proj": replicated,
                "switch_mlp.down_proj": replicated,
            },
            id="whole experts on every rank, summed",
        ),
        pytest.param("replicated-wo_b", {"wo_b": replicated}, id="a partial sum never added up"),
    ],
)
def test_faults_of_v4_tables_are_seen(strategy, places):
    """Every misplaced parameter of DeepSeek V4 moves the logits far beyond rounding."""
    seen(V4, table(V4, strategy, places))


@pytest.mark.parametrize(
    ("strategy", "places"),
    [
        ("tensor", {"wo_b": OnEveryRank(axis=IN, units="o_groups")}),
        ("replicated-wo_b-late", {"wo_b": replicated}),
    ],
)
def test_a_bias_added_by_every_rank_is_seen(strategy, places):
    """The bias of wo_b added once per rank."""
    seen(V4_BIASED, table(V4_BIASED, strategy, places))


def test_upstreams_fault_is_the_contiguous_sink_and_nothing_else():
    """mlx-vlm's split equals our late strategy with contiguous sinks, so that is what is wrong with it."""
    ours = outputs(V4, table(V4, "replicated-wo_b-late", {"attn_sink": vector("n_heads")}))
    theirs = small.split(V4, "upstream", 2, (9, 1))
    assert small.difference(ours[0], theirs[0]) <= small.TOLERANCE
    assert small.distance(theirs, V4, (9, 1)) > small.VISIBLE


def test_zero_sinks_hide_upstreams_fault():
    """With every sink at its initial zero upstream's split passes: that is why weights are random everywhere."""

    def without_sinks(model: nn.Module, _: Any = None) -> None:
        for layer in model.layers:
            layer.attn.attn_sink = mx.zeros_like(layer.attn.attn_sink)

    model = small.whole(V4)
    without_sinks(model)
    expected = small.logits(model, (9, 1))
    hidden = small.split(V4, "upstream", 2, (9, 1), without_sinks)
    assert small.difference(hidden[0], expected) <= small.TOLERANCE


def test_whole_sinks_on_a_rank_with_half_the_heads_raise():
    """Sinks that are not sliced at all do not fit the heads, and the attention says so."""
    with pytest.raises(ValueError, match="sinks"):
        outputs(V4, table(V4, "tensor", {"attn_sink": replicated}))


def test_wo_a_cut_along_its_rank_is_seen():
    """One group a rank, wo_a cut along its outputs: every shape broadcasts and the sum is of the wrong groups."""
    places = {"wo_a": column(), "attn_sink": vector("n_heads")}
    seen(V4, table(V4, "tensor", places), ranks=4)


def test_wo_a_cut_along_its_inputs_where_groups_are_dealt_out_raises():
    """Whole groups a rank and a row cut of wo_a do not fit together."""
    with pytest.raises(ValueError, match="matmul"):
        outputs(V4, table(V4, "tensor", {"wo_a": row()}))


def test_groups_cut_where_every_rank_has_all_of_them_raise():
    """Interleaved heads and whole groups of wo_a do not fit together."""
    with pytest.raises(ValueError, match=r"matmul|broadcast"):
        outputs(V4, table(V4, "replicated-wo_b", {"wo_a": stacked("o_groups")}))


def test_the_wrong_rank_order_in_a_gather_is_seen(monkeypatch):
    """Outputs gathered in the order 1, 0 are the right numbers in the wrong places."""

    def backwards(x: mx.array, group: Any) -> mx.array:
        parts = mx.distributed.all_gather(x[None], group=group)
        return mx.concatenate([parts[i] for i in reversed(range(group.size()))], axis=-1)

    monkeypatch.setattr(collectives, "all_gather_features", backwards)
    seen(V4, table(V4, "gathered-wo_b", {}))


@pytest.mark.parametrize(
    "places",
    [
        pytest.param({"o_proj": row("n_heads")}, id="attention never summed"),
        pytest.param({"down_proj": row()}, id="MLP never summed"),
        pytest.param({"k_proj": AtRankZero(axis=OUT, units="n_kv_heads")}, id="keys of rank 0 everywhere"),
        pytest.param(
            {"o_proj": interleaved(IN, "n_heads", "n_kv_heads", reduce=("sum_output",))},
            id="interleaved inputs of o_proj",
        ),
        pytest.param({"up_proj": AtRankZero(axis=OUT)}, id="MLP outputs of rank 0 everywhere"),
    ],
)
def test_faults_of_llama_tables_are_seen(places):
    """Every misplaced parameter of a dense model moves the logits far beyond rounding."""
    seen(LLAMA, table(LLAMA, "tensor", places))


@pytest.mark.parametrize("kept", [("n_heads",), ("n_kv_heads",), ()])
def test_head_counts_left_undivided_are_seen(kept):
    """Counts that stay as they were raise, or give other heads; they never pass."""
    blocks = table(LLAMA, "tensor", {"q_proj": heads("n_heads")}, divide=kept)
    try:
        result = outputs(LLAMA, blocks)
    except ValueError:
        return
    assert small.distance(result, LLAMA, (9, 1)) > small.VISIBLE


def bias_inside(model: nn.Module, _: Any) -> None:
    """Put each bias back into its projection, in front of the sum."""
    for _, module in model.named_modules():
        if isinstance(module, collectives.AllSumAfter) and "bias" in module:
            module.inner.bias = module.pop("bias")


def bias_divided_twice(model: nn.Module, group: Any) -> None:
    """Divide each bias by the ranks twice and add it on every rank."""
    for _, module in model.named_modules():
        if isinstance(module, collectives.AllSumAfter) and "bias" in module:
            module.inner.bias = module.pop("bias") / group.size() ** 2


@pytest.mark.parametrize("harm", [bias_inside, bias_divided_twice])
def test_a_row_parallel_bias_that_does_not_count_once_is_seen(harm):
    """Biases added by every rank, or divided twice, which zero biases and equal tokens would hide."""
    seen(BIASED, table(BIASED, "tensor", {}), harm=harm)


def test_a_shared_expert_missing_on_one_rank_is_seen():
    """A rank whose shared expert never reaches the sum."""

    def harm(model: nn.Module, group: Any) -> None:
        if group.rank() == 0:
            for layer in model.layers:
                layer.ffn.shared_experts.down_proj.weight *= 0

    seen(V4, table(V4, "tensor", {}), harm=harm)


def test_shared_experts_left_out_of_the_sum_make_ranks_differ():
    """A share added after the sum instead of before it: wrong, and each rank has other logits."""

    def harm(model: nn.Module, _: Any) -> None:
        for layer in model.layers:
            moe = layer.ffn
            layer.ffn = AddsSharedAfterwards(moe, moe.shared_experts)
            moe.shared_experts = Nothing()

    result = outputs(V4, table(V4, "tensor", {}), harm=harm)
    assert small.distance(result, V4, (9, 1)) > small.VISIBLE
    assert not small.identical(result)


@pytest.mark.parametrize("name", ["wq_b", "wo_b", "wo_a"])
def test_scales_that_do_not_follow_their_weight_are_seen(name):
    """Scales and biases of a quantised layer taken from rank 0, while the weight is this rank's share."""
    first: dict[str, mx.array] = {}

    def harm(model: nn.Module, group: Any) -> None:
        for path, array in parameters_of(model).items():
            if f".attn.{name}." in path and path.rpartition(".")[2] in ("scales", "biases"):
                if group.rank() == 0:
                    first[path] = array
                else:
                    parent, _, own = path.rpartition(".")
                    at(model, parent)[own] = first[path]

    seen(V4_QUANTISED, table(V4_QUANTISED, "tensor", {}), harm=harm)


def test_scales_left_whole_are_seen():
    """A quantised weight sliced without its scales: raises, or reads the scales of row 0 on."""
    whole = parameters_of(small.whole(V4_QUANTISED))

    def harm(model: nn.Module, _: Any) -> None:
        for path in parameters_of(model):
            if ".attn.wq_b." in path and path.rpartition(".")[2] in ("scales", "biases"):
                parent, _, own = path.rpartition(".")
                at(model, parent)[own] = whole[path]

    try:
        result = outputs(V4_QUANTISED, table(V4_QUANTISED, "tensor", {}), harm=harm)
    except ValueError:
        return
    assert small.distance(result, V4_QUANTISED, (9, 1)) > small.VISIBLE


def test_a_router_that_is_not_the_same_everywhere_is_seen():
    """Ranks that route the same token to other experts add up parts of different experts."""

    def harm(model: nn.Module, group: Any) -> None:
        for layer in model.layers:
            if "e_score_correction_bias" in layer.ffn.gate and group.rank():
                layer.ffn.gate.e_score_correction_bias = layer.ffn.gate.e_score_correction_bias[::-1]

    seen(V4, table(V4, "tensor", {}), harm=harm)


def test_a_hash_table_that_is_not_the_same_everywhere_is_seen():
    """The same for the layers that route by token."""

    def harm(model: nn.Module, group: Any) -> None:
        for layer in model.layers:
            if "tid2eid" in layer.ffn.gate and group.rank():
                layer.ffn.gate.tid2eid = (layer.ffn.gate.tid2eid + 1) % 8

    seen(V4, table(V4, "tensor", {}), harm=harm)


def test_ranks_with_weights_of_another_seed_are_seen():
    """A rank that drew other random numbers than its peers."""
    other = dataclasses.replace(V4, seed=V4.seed + 1)
    plan = small.plan_of(V4)

    def work(group: Any) -> mx.array:
        source = other if group.rank() else V4
        return small.logits(apply.shard(load.lazy(source), plan, group), (9, 1))

    assert small.distance(lockstep.run(2, work), V4, (9, 1)) > small.VISIBLE
