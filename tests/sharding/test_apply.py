"""Applying a plan: what a rank holds afterwards, what several strategies share, and what memory it takes."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from sharding import apply, collectives, costs, load, lockstep, strategies
from sharding.errors import Rejected
from sharding.placement import Cut
from sharding.trace import StandInGroup
from sharding.tree import at, parameters_of
from tests.sharding import small


def held(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(array.nbytes for array in parameters_of(model).values())


@pytest.mark.parametrize(
    ("config", "quantize", "strategy", "ranks"),
    [
        (small.BIASED, None, "tensor", 2),
        (small.TIED, "mxfp4", "tensor", 4),
        (small.QWEN3, "4bit", "tensor", 4),
        *((small.V4_BIASED, None, strategy, 2) for strategy in small.V4_STRATEGIES),
        *((small.V4_WIDE, "4bit", strategy, 4) for strategy in small.V4_STRATEGIES),
        (small.V4_WIDE, "mxfp8", "tensor", 2),
    ],
)
def test_the_planned_bytes_are_the_bytes_held(config, quantize, strategy, ranks):
    """The weight bytes of a plan, kept whole and shared, are those of every rank's arrays, to the byte."""
    source = small.resolve(config, quantize=quantize)
    whole = costs.parameters(load.lazy(source, values=False))
    plan = small.plan_of(source, strategy, ranks)
    planned = costs.planned_weights(whole, plan, 1, 2)
    found = strategies.resolve(strategy, source.model_type)
    for model in lockstep.run(ranks, lambda group: found.apply(load.lazy(source), group)):
        assert held(model) == planned.held
        replicated = sum(
            array.nbytes
            for path, array in parameters_of(model).items()
            if not isinstance(plan.cuts[path.replace(".inner.", ".")], Cut)
        )
        assert replicated == planned.replicated


def test_a_rank_holds_nothing_but_its_share():
    """What applying leaves allocated is the rank's own arrays; the whole weights are gone."""
    source = small.resolve({**small.LLAMA, "hidden_size": 256, "intermediate_size": 1024})
    found = strategies.resolve("tensor", "llama")
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    model = found.apply(load.lazy(source), StandInGroup(1, 4))
    mx.clear_cache()
    left = mx.get_active_memory() - before
    arrays = len(parameters_of(model))
    # An array of a few hundred bytes takes a whole block of the allocator.
    assert held(model) <= left <= held(model) + arrays * 2**12


def test_a_plan_is_only_for_its_world_size():
    """A plan for two ranks can't be applied to three."""
    source = small.resolve(small.LLAMA)
    with pytest.raises(ValueError, match="2 ranks can't be applied to a group of 3"):
        apply.shard(load.lazy(source), small.plan_of(source), StandInGroup(0, 3))


def test_a_refused_plan_leaves_the_model_alone():
    """What the plan refuses, loading refuses with the same reasons, before anything is changed."""
    source = small.resolve({**small.LLAMA, "num_key_value_heads": 2})
    model = load.lazy(source)
    before = {path: tuple(array.shape) for path, array in parameters_of(model).items()}
    with pytest.raises(Rejected) as planned:
        small.plan_of(source, ranks=4)
    with pytest.raises(Rejected) as applied:
        strategies.resolve("tensor", "llama").apply(model, StandInGroup(0, 4))
    assert applied.value.reasons == planned.value.reasons
    assert {path: tuple(array.shape) for path, array in parameters_of(model).items()} == before


def test_one_rank_changes_nothing():
    """At world size 1 the model keeps its modules and its numbers."""
    source = small.resolve(small.V4_BIASED)
    model = load.lazy(source)
    apply.shard(model, small.plan_of(source, ranks=1), StandInGroup(0, 1))
    assert small.same_parameters(model, small.whole(source))
    assert not any(isinstance(m, collectives.Communicating) for _, m in model.named_modules())
    assert model.layers[0].attn.sharding_group is None


def test_layers_that_communicate_are_called_whole():
    """No wrapper passes for the layer it wraps, and none lets a short chunk be split into tokens."""
    source = small.resolve(small.V4)
    found = strategies.resolve("gathered-wo_b", source.model_type)
    model = found.apply(load.lazy(source), StandInGroup(0, 2), evaluate=False)
    wrappers = [m for _, m in model.named_modules() if isinstance(m, collectives.Communicating)]
    assert len(wrappers) == len(model.layers)
    model.eval()
    assert all(w.training for w in wrappers)
    assert not any(isinstance(w, nn.Linear | nn.QuantizedLinear) for w in wrappers)


def test_a_quantised_share_keeps_its_quantisation():
    """Splitting changes neither bits, group size nor mode of a layer."""
    source = small.resolve(small.V4_WIDE, quantize="mxfp8")
    found = strategies.resolve("tensor", source.model_type)
    whole = load.lazy(source)
    model = found.apply(load.lazy(source), StandInGroup(1, 2), evaluate=False)
    kinds = 0
    for path, module in whole.named_modules():
        if "scales" in module:
            other: Any = at(model, path)
            assert (other.bits, other.group_size, other.mode) == (8, 32, "mxfp8")
            kinds += 1
    assert kinds > 10


def shared_bytes(
    pool: apply.Pool, source, names: list[str], rank: int = 0, ranks: int = 2
) -> list[nn.Module]:
    """Models of several strategies of one rank, made with one pool."""
    models = []
    for name in names:
        found = strategies.resolve(name, source.model_type)
        models.append(found.apply(load.lazy(source), StandInGroup(rank, ranks), pool=pool))
    return models


def test_a_pool_holds_equal_slices_once():
    """Two strategies that cut a parameter alike hold one array of it, and it is counted what that saves."""
    source = small.resolve(small.V4)
    pool = apply.Pool()
    early, late = shared_bytes(pool, source, ["replicated-wo_b", "replicated-wo_b-late"])
    plans = [small.plan_of(source, name) for name in ("replicated-wo_b", "replicated-wo_b-late")]
    ours, theirs = parameters_of(early), parameters_of(late)
    same = [path for path in theirs if plans[0].cuts.get(path) == plans[1].cuts[path] and path in ours]
    assert len(same) > 20
    assert all(ours[path] is theirs[path] for path in same)
    assert pool.shared_bytes >= sum(theirs[path].nbytes for path in same)


def test_a_pool_never_changes_a_model():
    """Models that share arrays have the same parameters as models made alone."""
    source = small.resolve(small.V4)
    names = ["tensor", "replicated-wo_b", "gathered-wo_b", "upstream", "tensor"]
    for rank in (0, 1):
        pooled = shared_bytes(apply.Pool(), source, names, rank)
        for name, model in zip(names, pooled, strict=True):
            (alone,) = shared_bytes(apply.Pool(), source, [name], rank)
            assert small.same_parameters(model, alone), name


def test_upstream_shares_the_arrays_it_splits_alike():
    """Foreign code's arrays are found in the pool by their content."""
    source = small.resolve(small.V4)
    pool = apply.Pool()
    ours, upstream = shared_bytes(pool, source, ["replicated-wo_b-late", "upstream"])
    mine, theirs = parameters_of(ours), parameters_of(upstream)
    experts = "model.layers.0.ffn.switch_mlp.up_proj.weight"
    assert mine[experts] is theirs[experts]
    assert pool.shared_bytes > 0.5 * held(upstream)


def test_the_sum_of_a_biased_layer_adds_the_bias_after_the_sum():
    """A row-parallel layer with a bias sums first: the result is the whole layer's, not N biases."""
    layer = nn.Linear(8, 6)
    layer.bias = mx.random.normal((6,), key=mx.random.key(1))
    x = mx.random.normal((2, 3, 8), key=mx.random.key(2))

    def work(group):
        own = nn.Linear(4, 6)
        own.weight, own.bias = Cut(-1, 8).take(layer.weight, group.rank(), 2), layer.bias
        part = Cut(-1, 8).take(x, group.rank(), 2)
        return collectives.AllSumAfter(own, group)(part)

    for output in lockstep.run(2, work):
        assert small.difference(output, layer(x)) < 1e-6


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gathered_features_are_in_rank_order(ranks):
    """Features of rank 0 come first, whatever the shape in front of them."""

    def work(group):
        return collectives.all_gather_features(mx.full((2, 3, 2), group.rank()), group)

    for output in lockstep.run(ranks, work):
        assert output.shape == (2, 3, 2 * ranks)
        assert output[1, 2].tolist() == [r for r in range(ranks) for _ in range(2)]
