"""Small models of every family, and the one measure by which the tests compare a split model with the whole one.

    distance(split(source, "tensor", 2), source)        # largest difference of logits, relative to the largest logit

The models are as narrow as the splits allow (a few thousand to a few hundred thousand parameters) and have every
kind of layer that their family has. Their weights are the product's own random weights.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sharding import load, lockstep, strategies
from sharding import source as sources
from sharding.families.registry import family_of
from sharding.forward import logits_of, make_cache
from sharding.placement import Block, Cut, Share
from sharding.plan import Plan, read_table
from sharding.source import Source
from sharding.tree import parameters_of

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = 2e-5
"""Correct splits in float32 stay below this; measured on these models: 1e-6 to 4e-6."""
VISIBLE = 100 * TOLERANCE
"""What a fault must exceed, so that the two can't be confused."""
BATCH = 2
SHORT = (9, 1, 2, 1)
"""Tokens of each forward pass: a prefill, then decode steps and a short chunk. mlx-vlm runs chunks of 2 to 8 tokens
in a way of its own, so both sides of 8 and of 1 occur."""
LONG = (132, 2, 9, 1)
"""As SHORT, with a prefill that fills DeepSeek V4's windows of 128 tokens and overflows its local attention."""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
TIED = {**LLAMA, "tie_word_embeddings": True}
BIASED = {**LLAMA, "attention_bias": True, "mlp_bias": True}
MISTRAL = {
    **LLAMA,
    "model_type": "mistral",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 4,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "max_position_embeddings": 4096}
V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 128,
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    # Local attention and both compressed kinds, hash-routed layers first: each kind of layer once or twice.
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 2,
    "sliding_window": 16,
    "o_groups": 4,
    "o_lora_rank": 32,
    "index_n_heads": 2,
    "index_head_dim": 32,
    # Fewer than the pooled tokens of LONG, so that the indexer really selects.
    "index_topk": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
}
V4_BIASED = {**V4, "attention_bias": True}
V4_WIDE = {**V4, "moe_intermediate_size": 256, "head_dim": 64, "o_lora_rank": 64}
"""Wide enough for 4 ranks to cut every input axis between quantisation groups of 64."""
V4_STRATEGIES = ("tensor", "replicated-wo_b", "replicated-wo_b-late", "gathered-wo_b")


def for_ranks(config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The config with head, group and feature counts that `ranks` divides, for world sizes that are unusual."""
    if config["model_type"] == "deepseek_v4":
        return {
            **config,
            "num_attention_heads": ranks * ranks,
            "o_groups": ranks,
            "head_dim": 16,
            "moe_intermediate_size": 32 * ranks,
            "hidden_size": 32 * ranks,
        }
    return {
        **config,
        "num_attention_heads": 2 * ranks,
        "num_key_value_heads": ranks,
        "intermediate_size": 32 * ranks,
    }


def resolve(config: dict[str, Any], **options: Any) -> Source:
    """A `Source` of a config that is written down nowhere."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        options.setdefault("dtype", "float32")
        return sources.resolve(str(path), **options)


def published(name: str, **options: Any) -> Source:
    """A `Source` of one of the published configs."""
    return sources.resolve(str(DATA / f"{name}.json"), **options)


def whole(source: Source) -> nn.Module:
    """The unsplit model, evaluated."""
    model = load.lazy(source)
    load.settle(model)
    return model


def table_of(source: Source, strategy: str = "tensor") -> tuple[Block, ...]:
    """A family's table."""
    family = family_of(source.model_type)
    assert family is not None
    return family.strategies[strategy]


def plan_of(
    source: Source,
    strategy: str | Sequence[Block] = "tensor",
    ranks: int = 2,
    change: Callable[[nn.Module], None] | None = None,
) -> Plan:
    """The plan of a strategy or of any table, on a model that `change` may alter first."""
    family = family_of(source.model_type)
    assert family is not None
    table = family.strategies[strategy] if isinstance(strategy, str) else strategy
    model = load.lazy(source, values=False)
    if change is not None:
        change(model)
    module = family.module(source.model_type)
    return read_table(model, table, family=family.name, strategy="of a test", module=module).plan(ranks)


def tokens(count: int, batch: int = BATCH, vocabulary: int = 128) -> mx.array:
    """The prompt of these tests, shape (batch, count)."""
    return mx.random.randint(0, vocabulary, (batch, count), key=mx.random.key(5))


def logits(model: nn.Module, lengths: Sequence[int] = SHORT, batch: int = BATCH) -> mx.array:
    """Logits of a prefill and of what follows it through one cache, shape (batch, tokens, vocabulary)."""
    ids, cache, parts, start = tokens(sum(lengths), batch), make_cache(model), [], 0
    for length in lengths:
        parts.append(logits_of(model(ids[:, start : start + length], cache=cache)))
        mx.eval(parts[-1])
        start += length
    return mx.concatenate(parts, axis=1)


@functools.cache
def _reference(key: str, lengths: tuple[int, ...]) -> mx.array:
    return logits(whole(Source.from_json(json.loads(key))), lengths)


def reference(source: Source, lengths: Sequence[int] = SHORT) -> mx.array:
    """Logits of the unsplit model; computed once for all tests."""
    return _reference(json.dumps(source.to_json()), tuple(lengths))


def split(
    source: Source,
    strategy: str,
    ranks: int,
    lengths: Sequence[int] = SHORT,
    then: Callable[[nn.Module, Any], None] | None = None,
) -> list[mx.array]:
    """Logits of every rank of the split model; `then(model, group)` may harm it first."""
    found = strategies.resolve(strategy, source.model_type)

    def work(group: Any) -> mx.array:
        model = found.apply(load.lazy(source), group)
        if then is not None:
            then(model, group)
        return logits(model, lengths)

    return lockstep.run(ranks, work)


def number(array: mx.array) -> float:
    """The value of an array of one real number."""
    value = array.item()
    assert isinstance(value, int | float)
    return value


def difference(ours: mx.array, theirs: mx.array) -> float:
    """Largest absolute difference, relative to the largest absolute value of `theirs`."""
    return number(mx.abs(ours - theirs).max() / mx.abs(theirs).max())


def distance(outputs: Sequence[mx.array], source: Source, lengths: Sequence[int] = SHORT) -> float:
    """How far the furthest rank is from the unsplit model."""
    expected = reference(source, lengths)
    return max(difference(output, expected) for output in outputs)


def identical(outputs: Sequence[mx.array]) -> bool:
    """Whether all ranks have the same bits."""
    return all(bool(mx.array_equal(output, outputs[0]).item()) for output in outputs)


def same_parameters(first: nn.Module, second: nn.Module) -> bool:
    """Whether two models have the same parameters, bit for bit."""
    ours, theirs = parameters_of(first), parameters_of(second)
    return ours.keys() == theirs.keys() and all(
        ours[p].dtype == theirs[p].dtype and bool(mx.array_equal(ours[p], theirs[p]).item()) for p in ours
    )


def share_shape(array: mx.array, share: Share, ranks: int) -> tuple[int, ...]:
    """Shape of one rank's share of `array`; with equal shares it is every rank's."""
    shape = list(array.shape)
    if isinstance(share, Cut):
        shape[array.ndim + share.axis] //= ranks
    return tuple(shape)
