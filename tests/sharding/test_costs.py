"""Costs by hand: parameters, bytes held, bytes read in a step, bytes at the worst moment of loading."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from sharding import costs, load
from sharding.tree import parameters_of
from tests.sharding import small


def counted(config, quantize=None):
    """The arrays of a small model by path."""
    source = small.resolve(config, quantize=quantize)
    integers = {"tid2eid": "num_experts"}
    return {p.path: p for p in costs.parameters(load.lazy(source, values=False), integers)}


@pytest.mark.parametrize("config", [small.BIASED, small.TIED, small.QWEN3, small.V4_BIASED])
@pytest.mark.parametrize("quantize", [None, "4bit"])
def test_every_array_is_counted_once(config, quantize):
    """The arrays of the costs are the model's parameters, with their shapes and bytes."""
    found = counted(config, quantize)
    model = load.lazy(small.resolve(config, quantize=quantize), values=False)
    real = parameters_of(model)
    assert found.keys() == real.keys()
    assert all(found[p].nbytes == a.nbytes and found[p].shape == tuple(a.shape) for p, a in real.items())


@pytest.mark.parametrize(
    ("mode", "bits", "group"), [("affine", b, 32) for b in (2, 3, 4, 5, 6, 8)] + [("mxfp4", 4, 32)]
)
def test_packed_weights_count_as_the_numbers_they_hold(mode, bits, group):
    """A quantised layer has as many parameters as the float layer, bias included, whatever the bits."""
    layer = nn.Linear(96, 40, bias=True)
    whole = sum(p.count for p in costs.parameters(layer))
    packed = layer.to_quantized(group_size=group, bits=bits, mode=mode)
    assert sum(p.count for p in costs.parameters(packed)) == whole == 96 * 40 + 40


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_an_embedding_is_read_by_the_row_unless_it_is_the_head(name):
    """A step looks up one row a sequence; a tied embedding is read whole, as the head."""
    found = counted(small.LLAMA if name == "llama" else small.TIED)
    table = found["model.embed_tokens.weight"]
    for batch in (1, 4, 1000):
        expected = 1.0 if name == "tied" else min(1.0, batch / 128)
        assert table.fraction(batch, 0) == expected
    if name == "llama":
        assert found["lm_head.weight"].fraction(1, 0) == 1.0


def test_experts_are_read_as_they_are_routed():
    """One sequence reads k of E experts; more read more, never all of them twice."""
    found = counted(small.V4)
    stack = found["model.layers.0.ffn.switch_mlp.up_proj.weight"]
    assert stack.experts == 8
    assert stack.fraction(1, 2) == pytest.approx(2 / 8)
    assert stack.fraction(2, 2) == pytest.approx(1 - (6 / 8) ** 2)
    assert stack.fraction(10_000, 2) == pytest.approx(1.0)
    assert stack.fraction(1, 8) == 1.0
    for path in ("model.layers.0.ffn.shared_experts.up_proj.weight", "model.layers.0.ffn.gate.weight"):
        assert found[path].fraction(1, 2) == 1.0
    hashes = found["model.layers.0.ffn.gate.tid2eid"]
    assert hashes.fraction(1, 2) == pytest.approx(1 / 128)


def test_bytes_of_a_small_llama_by_hand():
    """Two ranks of llama: half of every projection, all of the rest; a step reads all but the embedding."""
    source = small.resolve(small.LLAMA)
    whole = costs.parameters(load.lazy(source, values=False))
    found = costs.planned_weights(whole, small.plan_of(source), 1, 0)
    hidden, width, heads, kv, vocabulary, layers = 64, 256, 8 * 32, 4 * 32, 128, 2
    layer = 4 * (hidden * heads * 2 + hidden * kv * 2 + 3 * hidden * width)
    norms = 4 * hidden * (2 * layers + 1)
    table = 4 * vocabulary * hidden
    assert found.held == layers * layer // 2 + norms + 2 * table
    assert found.replicated == norms + 2 * table
    assert found.read == layers * layer // 2 + norms + table + 4 * hidden
    assert found.load_peak == found.held + layer


def test_one_rank_replicates_nothing_and_loads_in_place():
    """At one rank nothing is held twice and nothing is freed."""
    source = small.resolve(small.V4)
    whole = costs.parameters(load.lazy(source, values=False))
    total = sum(p.nbytes for p in whole)
    found = costs.planned_weights(whole, small.plan_of(source, ranks=1), 1, 2)
    assert (found.held, found.replicated, found.load_peak) == (total, 0, total)
    assert costs.measured_weights(whole, whole, 1, 1, 2) == found


@pytest.mark.parametrize("strategy", small.V4_STRATEGIES)
def test_a_plan_and_a_measurement_of_its_result_agree(strategy):
    """The arrays that a plan leaves, measured as foreign code's are, give the planned figures."""
    from sharding import apply
    from sharding.trace import StandInGroup

    source = small.resolve(small.V4_WIDE, quantize="4bit")
    whole = costs.parameters(load.lazy(source, values=False))
    plan = small.plan_of(source, strategy)
    model = apply.shard(load.lazy(source, values=False), plan, StandInGroup(1, 2), evaluate=False)
    measured = costs.measured_weights(whole, costs.parameters(model), 2, 4, 2)
    planned = costs.planned_weights(whole, plan, 4, 2)
    assert (measured.held, measured.replicated) == (planned.held, planned.replicated)
    assert measured.read == planned.read


def test_counting_touches_no_weight():
    """Costs are arithmetic on shapes."""
    source = small.published("DeepSeek-V4-Flash")
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    costs.parameters(load.lazy(source, values=False))
    assert mx.get_peak_memory() - before < 2**20
