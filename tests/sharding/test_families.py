"""Every family split in every way, ranks in lockstep: the split model computes what the whole one does."""

from __future__ import annotations

import pytest

from sharding import load
from sharding.families import registry
from sharding.placement import Block
from sharding.source import QUANTISATIONS
from tests.sharding import small

DENSE = {
    "llama": small.LLAMA,
    "tied": small.TIED,
    "biased": small.BIASED,
    "mistral": small.MISTRAL,
    "qwen3": small.QWEN3,
}


def agrees(source, strategy, ranks, lengths=small.SHORT):
    """Assert that all ranks agree with the whole model in float32, and with each other in every bit."""
    outputs = small.split(source, strategy, ranks, lengths)
    assert len(outputs) == ranks
    assert small.distance(outputs, source, lengths) <= small.TOLERANCE
    assert small.identical(outputs)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", DENSE)
def test_dense_split_equals_the_whole(name, ranks):
    """A dense model split over 2 or 4 ranks has the logits of the unsplit one, in prefill and in decode."""
    agrees(small.resolve(DENSE[name]), "tensor", ranks)


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("name", ["biased", "qwen3"])
def test_dense_split_over_unusual_world_sizes(name, ranks):
    """Nothing but divisibility decides: 3 ranks and 8 ranks are right where they are legal."""
    agrees(small.resolve(small.for_ranks(DENSE[name], ranks)), "tensor", ranks)


@pytest.mark.parametrize("strategy", small.V4_STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_v4_split_equals_the_whole(strategy, ranks):
    """Each way to split DeepSeek V4 has the unsplit model's logits at 2 and 4 ranks."""
    agrees(small.resolve(small.V4), strategy, ranks)


@pytest.mark.parametrize("strategy", small.V4_STRATEGIES)
def test_v4_split_through_every_window(strategy):
    """They still agree where every compressor has pooled, the indexer selects and the local window rolls over."""
    agrees(small.resolve(small.V4), strategy, 2, small.LONG)


@pytest.mark.parametrize("strategy", small.V4_STRATEGIES)
def test_v4_split_with_a_bias_on_wo_b(strategy):
    """With `attention_bias` the bias of wo_b counts once, whoever sums."""
    agrees(small.resolve(small.V4_BIASED), strategy, 2, (9, 1))


@pytest.mark.parametrize(("strategy", "ranks"), [("tensor", 3), ("gathered-wo_b", 3), ("tensor", 8)])
def test_v4_split_over_unusual_world_sizes(strategy, ranks):
    """DeepSeek V4 splits over 3 and 8 ranks where its groups allow it."""
    agrees(small.resolve(small.for_ranks(small.V4, ranks)), strategy, ranks, (9, 1))


@pytest.mark.parametrize("quantize", QUANTISATIONS)
@pytest.mark.parametrize("name", ["biased", "qwen3"])
def test_quantised_dense_split_equals_the_whole(name, quantize):
    """Slices of quantised weights are the same numbers as the whole, whatever the quantisation."""
    agrees(small.resolve(DENSE[name], quantize=quantize), "tensor", 4)


@pytest.mark.parametrize(
    ("strategy", "quantize", "ranks"),
    [
        *((strategy, "4bit", 4) for strategy in small.V4_STRATEGIES),
        *(
            (strategy, other, 2)
            for strategy in ("tensor", "gathered-wo_b")
            for other in ("8bit", "mxfp4", "mxfp8")
        ),
    ],
)
def test_quantised_v4_split_equals_the_whole(strategy, quantize, ranks):
    """The same for DeepSeek V4's stacked experts and grouped output projection."""
    agrees(small.resolve(small.V4_WIDE, quantize=quantize), strategy, ranks, (9, 1))


@pytest.mark.parametrize("strategy", ["tensor", "replicated-wo_b"])
def test_v4_split_with_the_quantisation_of_a_release(strategy):
    """Experts in mxfp4, attention and shared experts in mxfp8, the rest affine, as mlx-vlm converts V4."""
    from mlx_vlm.models.deepseek_v4.language import make_quantization_config

    model = load.lazy(small.resolve(small.V4_WIDE), values=False)
    source = small.resolve({**small.V4_WIDE, "quantization": make_quantization_config(model)})
    modes = {m.mode for _, m in load.lazy(source, values=False).named_modules() if "scales" in m}
    assert modes == {"affine", "mxfp4", "mxfp8"}
    agrees(source, strategy, 2, (9, 1))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_upstream_split_of_dense_models_equals_the_whole(name):
    """The models' own `shard()` is right for llama and qwen3, and is measured by the same yardstick."""
    agrees(small.resolve(DENSE[name]), "upstream", 2)


def test_upstream_split_of_v4_is_wrong():
    """mlx-vlm's `shard()` slices the sinks otherwise than the heads: its ranks agree with each other and are wrong."""
    source = small.resolve(small.V4)
    outputs = small.split(source, "upstream", 2)
    assert small.identical(outputs)
    assert small.distance(outputs, source) > small.VISIBLE


def test_one_rank_is_never_split():
    """At world size 1 every strategy, upstream's too, is the whole model, bit for bit."""
    for name, config in {**DENSE, "v4": small.V4}.items():
        source = small.resolve(config)
        for strategy in ("tensor", "upstream"):
            (output,) = small.split(source, strategy, 1, (9, 1))
            assert small.distance([output], source, (9, 1)) == 0, name


def test_every_model_type_belongs_to_one_family():
    """No two families claim the same model type, and each strategy's table has each class once."""
    claimed = [t for family in registry.FAMILIES for t in family.model_types]
    assert sorted(claimed) == sorted(set(claimed))
    for family in registry.FAMILIES:
        for table in family.strategies.values():
            classes = [block.cls for block in table]
            assert all(isinstance(block, Block) for block in table)
            assert sorted(classes) == sorted(set(classes))


def test_known_wrong_strategies_are_named_with_their_reason():
    """What a family calls known to be wrong is one of its strategies or `upstream`, and says why."""
    for family in registry.FAMILIES:
        for name, reason in family.known_wrong.items():
            assert name == "upstream" or name in family.strategies
            assert reason.strip()
