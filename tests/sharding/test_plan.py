"""Plans: what is accepted, what is refused and in which words, and that no parameter escapes."""

from __future__ import annotations

import json
import math
import re
import types

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding import load, lockstep, strategies
from sharding.errors import Rejected
from sharding.placement import Block, Cut, Once, column, replicated
from sharding.plan import Plan, collapse, read_table
from sharding.tree import parameters_of
from tests.sharding import small

bounded = settings(derandomize=True, max_examples=30, deadline=None, database=None)


def reasons(call) -> list[str]:
    """The reasons with which a plan is refused."""
    with pytest.raises(Rejected) as caught:
        call()
    assert all("\n" not in line for line in caught.value.reasons)
    return caught.value.reasons


@pytest.mark.parametrize("strategy", small.V4_STRATEGIES)
def test_every_parameter_has_exactly_one_share(strategy):
    """A plan's cuts are the model's parameters, all of them and nothing else."""
    source = small.resolve(small.V4_WIDE, quantize="4bit")
    plan = small.plan_of(source, strategy)
    assert plan.cuts.keys() == parameters_of(load.lazy(source, values=False)).keys()


def test_an_unknown_parameter_of_a_block_is_refused_by_name():
    """A parameter that a new release adds to a block stops the plan, which names it."""

    def change(model: nn.Module) -> None:
        model.model.layers[1].self_attn.gate = mx.zeros((3, 3))

    (line,) = reasons(lambda: small.plan_of(small.resolve(small.LLAMA), change=change))
    assert "model.layers.1.self_attn.gate" in line


def test_an_unknown_module_is_refused_by_name():
    """A new child module, such as a norm that llama does not have, is not replicated in silence."""

    def change(model: nn.Module) -> None:
        model.model.layers[0].self_attn.q_norm = nn.RMSNorm(32)

    (line,) = reasons(lambda: small.plan_of(small.resolve(small.LLAMA), change=change))
    assert "model.layers.0.self_attn.q_norm.weight" in line


def test_an_unknown_parameter_of_a_split_layer_is_refused_by_name():
    """A parameter that a linear layer does not have is refused by name where the layer is split."""

    def change(model: nn.Module) -> None:
        model.model.layers[1].self_attn.q_proj.lora_a = mx.zeros((3, 3))

    (line,) = reasons(lambda: small.plan_of(small.resolve(small.LLAMA), change=change))
    assert "model.layers.1.self_attn.q_proj.lora_a" in line


class Adapter(nn.Module):
    """A layer around a linear layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear


def test_a_wrapped_layer_is_refused_by_name():
    """A layer that is no linear layer, where the table splits one, is refused by name and not by an exception."""

    def change(model: nn.Module) -> None:
        attention = model.model.layers[1].self_attn
        attention.q_proj = Adapter(attention.q_proj)

    (line,) = reasons(lambda: small.plan_of(small.resolve(small.LLAMA), change=change))
    assert "model.layers.1.self_attn.q_proj" in line


def test_a_class_of_the_same_name_from_another_module_is_not_taken():
    """Tables hold for the classes of one module: another library's class of that name is left uncovered, by name."""
    elsewhere = types.new_class(
        "MLP", (nn.Module,), {}, lambda space: space.update(__module__="transformers.fake")
    )

    def change(model: nn.Module) -> None:
        other = elsewhere()
        for name, child in model.model.layers[0].mlp.children().items():
            other[name] = child
        model.model.layers[0].mlp = other

    found = reasons(lambda: small.plan_of(small.resolve(small.LLAMA), change=change))
    assert len(found) == 3
    assert all(line.startswith("model.layers.0.mlp.") for line in found)


def test_a_parameter_claimed_twice_is_refused():
    """Two entries that claim the same parameter are an error of the table, and the plan says so."""
    head = Block("Model", {"lm_head": replicated, "model.norm": replicated})
    table = [block for block in small.table_of(small.resolve(small.LLAMA)) if block.cls != "Model"]
    (line,) = reasons(lambda: small.plan_of(small.resolve(small.LLAMA), [*table, head]))
    assert line == "model.norm.weight: claimed by two entries of the table"


def test_a_missing_entry_is_refused_for_all_layers_in_one_line():
    """Reasons that differ only in the layer's number are one line that counts the layers."""
    table = [block for block in small.table_of(small.resolve(small.LLAMA)) if block.cls != "TransformerBlock"]
    found = reasons(lambda: small.plan_of(small.resolve(small.LLAMA), table))
    assert len(found) == 2
    assert all("layers.*." in line and line.endswith("(2 layers)") for line in found)


def test_collapse_keeps_what_differs():
    """Only equal lines about several layers are folded; other numbers stay apart."""
    lines = ["a.layers.0.x: 3", "a.layers.1.x: 3", "a.layers.2.x: 4", "b: 1"]
    assert collapse(lines) == ["a.layers.*.x: 3 (2 layers)", "a.layers.2.x: 4", "b: 1"]


@pytest.mark.parametrize(
    ("name", "strategy", "ranks", "words"),
    [
        ("SmolLM2-135M", "tensor", 2, "9 heads do not divide by 2 ranks"),
        ("Llama-3.1-8B", "tensor", 16, "8 heads do not divide by 16 ranks"),
        ("DeepSeek-V4-Flash", "tensor", 3, "8 output groups do not divide by 3 ranks"),
        ("DeepSeek-V4-Flash", "tensor", 16, "8 output groups do not divide by 16 ranks"),
        ("DeepSeek-V4-Flash", "replicated-wo_b", 16, "8 heads in each of 8 groups do not divide by 16 ranks"),
        ("DeepSeek-V4-Flash", "gathered-wo_b", 3, "4096 features do not divide by 3 ranks"),
    ],
)
def test_published_models_are_refused_in_words(name, strategy, ranks, words):
    """What a real model can't do is said with the count, what is counted, and the ranks."""
    assert any(
        words in line for line in reasons(lambda: small.plan_of(small.published(name), strategy, ranks))
    )


@pytest.mark.parametrize(
    ("name", "strategy", "ranks"),
    [
        ("SmolLM2-135M", "tensor", 3),
        ("Llama-3.1-8B", "tensor", 8),
        ("Qwen3-8B", "tensor", 4),
        ("DeepSeek-V4-Flash", "tensor", 8),
        ("DeepSeek-V4-Pro", "tensor", 16),
        *(("DeepSeek-V4-Flash", strategy, 4) for strategy in small.V4_STRATEGIES),
    ],
)
def test_published_models_are_accepted(name, strategy, ranks):
    """What a real model can do is planned: equal shares, and two sums a layer."""
    source = small.published(name)
    plan = small.plan_of(source, strategy, ranks)
    sums = [c for c in plan.collectives if c.kind == "all_sum"]
    assert len(sums) == 2 * source.config["num_hidden_layers"]


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[str, str, int]:
    """A config of any family with random counts, as JSON, a strategy and a world size; every other case is legal."""
    ranks = draw(st.integers(2, 4))
    times = ranks if draw(st.booleans()) else 1
    kind = draw(st.sampled_from(["llama", "qwen3", "deepseek_v4", "deepseek_v4"]))
    if kind == "deepseek_v4":
        groups = times * draw(st.sampled_from([1, 1, 2, 3]))
        config = {
            **small.V4,
            "num_hidden_layers": 2,
            "compress_ratios": [4, 128],
            "num_hash_layers": 1,
            "o_groups": groups,
            "num_attention_heads": groups * times * draw(st.sampled_from([1, 1, 2, 3])),
            "moe_intermediate_size": 32 * times * draw(st.sampled_from([1, 2])),
            "hidden_size": 32 * times,
            "head_dim": 32,
            "o_lora_rank": draw(st.sampled_from([32, 48, 64])),
            "attention_bias": draw(st.booleans()),
        }
        return json.dumps(config), draw(st.sampled_from(small.V4_STRATEGIES)), ranks
    kv = times * draw(st.sampled_from([1, 2, 3]))
    config = {
        **(small.BIASED if kind == "llama" and draw(st.booleans()) else small.LLAMA),
        "model_type": kind,
        "max_position_embeddings": 64,
        "num_hidden_layers": 1,
        "num_key_value_heads": kv,
        "num_attention_heads": kv * draw(st.sampled_from([1, 2, 3])),
        "intermediate_size": times * draw(st.sampled_from([32, 48, 64])),
        "hidden_size": draw(st.sampled_from([32, 64, 96])),
        "tie_word_embeddings": draw(st.booleans()),
    }
    return json.dumps(config), "tensor", ranks


@bounded
@given(small_cases(), st.sampled_from([None, "4bit", "mxfp4"]))
def test_what_is_planned_can_be_applied_and_what_is_refused_can_not(case, quantize):
    """A plan says yes exactly where the split loads and runs right, else both refuse with the same reasons."""
    text, strategy, ranks = case
    source = small.resolve(json.loads(text), quantize=quantize)
    refused: list[str] = []
    try:
        small.plan_of(source, strategy, ranks)
    except Rejected as rejected:
        refused = rejected.reasons
    if refused:
        assert reasons(lambda: small.split(source, strategy, ranks, (9, 1))) == refused
    else:
        outputs = small.split(source, strategy, ranks, (9, 1))
        assert small.difference(outputs[0], small.logits(small.whole(source), (9, 1))) <= small.TOLERANCE
        assert small.identical(outputs)


@bounded
@given(small_cases())
def test_a_refusal_is_arithmetic(case):
    """Without quantisation a config is refused exactly when a count does not divide, which anyone can work out."""
    text, strategy, ranks = case
    config = json.loads(text)
    if config["model_type"] == "deepseek_v4":
        groups = config["o_groups"]
        counts = [config["moe_intermediate_size"]]
        counts.append(groups if strategy == "tensor" else config["num_attention_heads"] // groups)
        if strategy == "gathered-wo_b":
            counts.append(config["hidden_size"])
    else:
        counts = [config[k] for k in ("num_attention_heads", "num_key_value_heads", "intermediate_size")]
    legal = all(count % ranks == 0 for count in counts)
    try:
        small.plan_of(small.resolve(config), strategy, ranks)
        assert legal
    except Rejected:
        assert not legal


@pytest.mark.parametrize("ranks", [0, -2])
def test_a_world_size_below_one_is_refused(ranks):
    """There is no plan for no ranks."""
    with pytest.raises(ValueError, match="at least 1 rank"):
        small.plan_of(small.resolve(small.LLAMA), ranks=ranks)


def test_heads_that_do_not_fill_their_groups_are_refused():
    """6 heads in 4 output groups are no model that can be split, and the plan says so."""
    source = small.resolve({**small.V4, "num_attention_heads": 6})
    for strategy in small.V4_STRATEGIES:
        assert any("6" in line for line in reasons(lambda s=strategy: small.plan_of(source, s)))


def test_one_rank_needs_nothing():
    """At world size 1 nothing communicates, is wrapped, or gets a group."""
    plan = small.plan_of(small.resolve(small.V4), ranks=1)
    assert (plan.collectives, plan.wraps, plan.groups) == ((), (), ())


@pytest.mark.parametrize("strategy", small.V4_STRATEGIES)
@pytest.mark.parametrize("quantize", [None, "4bit"])
def test_all_shares_together_are_the_model(strategy, quantize):
    """The arrays that all ranks hold, joined as the plan says, are the whole model's, bit for bit."""
    source = small.resolve({**small.V4_WIDE, "attention_bias": True}, quantize=quantize)
    plan = small.plan_of(source, strategy)
    together(source, plan, strategy)


@pytest.mark.parametrize("config", [small.BIASED, small.QWEN3, small.TIED])
def test_all_shares_together_are_the_dense_model(config):
    """The same for the dense families, with and without biases."""
    source = small.resolve(config, quantize="mxfp4")
    together(source, small.plan_of(source), "tensor")


def together(source, plan: Plan, strategy: str) -> None:
    """Assert that the ranks' shares join to the whole, and that each has the shape that the plan foretells."""
    found = strategies.resolve(strategy, source.model_type)
    ranks = lockstep.run(plan.ranks, lambda group: parameters_of(found.apply(load.lazy(source), group)))
    for path, array in parameters_of(small.whole(source)).items():
        cut = plan.cuts[path]
        held = [shares[path] if path in shares else shares[inner(path)] for shares in ranks]
        assert all(tuple(share.shape) == small.share_shape(array, cut, plan.ranks) for share in held), path
        assert all(share.dtype == array.dtype for share in held), path
        if cut is None:
            assert all(mx.array_equal(share, array).item() for share in held), path
        else:
            assert isinstance(cut, Cut | Once)
            assert mx.array_equal(cut.join(held), array).item(), path


def inner(path: str) -> str:
    """Path of a parameter inside a layer that communicates."""
    parent, _, name = path.rpartition(".")
    return f"{parent}.inner.{name}"


def test_quantised_arrays_of_one_layer_are_cut_alike():
    """Weight, scales and biases of a quantised layer keep the same rows, and the same groups of inputs."""
    source = small.resolve(small.V4_WIDE, quantize="4bit")
    model = load.lazy(source, values=False)
    for strategy in small.V4_STRATEGIES:
        plan = small.plan_of(source, strategy)
        for path, cut in plan.cuts.items():
            if path.endswith(".scales"):
                base = path.removesuffix(".scales")
                arrays = parameters_of(model)
                assert plan.cuts[f"{base}.weight"] == cut
                shapes = [
                    small.share_shape(arrays[f"{base}.{n}"], plan.cuts[f"{base}.{n}"], 2)
                    for n in ("weight", "scales")
                ]
                assert shapes[0][:-1] == shapes[1][:-1]
                assert shapes[0][-1] * 32 // 4 == shapes[1][-1] * 64


def test_counts_that_become_shares_divide():
    """Whatever is divided comes out even, so that heads times head size is the width of what is left."""
    source = small.resolve(small.LLAMA)
    found = strategies.resolve("tensor", "llama")

    def work(group):
        return [layer.self_attn for layer in found.apply(load.lazy(source), group).layers]

    for attentions in lockstep.run(4, work):
        for attention in attentions:
            assert attention.n_heads * 32 == attention.q_proj.weight.shape[0]
            assert attention.n_kv_heads * 32 == attention.k_proj.weight.shape[0]
            assert attention.n_heads * 32 == attention.o_proj.inner.weight.shape[1]


def test_the_plan_touches_no_weights():
    """Planning the largest published model takes no memory that a weight could be in."""
    source = small.published("DeepSeek-V4-Pro")
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for strategy in small.V4_STRATEGIES:
        small.plan_of(source, strategy, 8)
    assert mx.get_peak_memory() - before < 2**20
    assert mx.get_active_memory() - before < 2**20


def test_shares_are_equal_in_every_axis():
    """One rank's shape is the whole's with one axis divided, so the ranks' sizes add up to the whole."""
    array = mx.zeros((6, 4, 8))
    for cut in (Cut(-3, 3), Cut(-2, 4), Cut(-1, 8, 2)):
        n = cut.units // cut.runs
        assert math.prod(small.share_shape(array, cut, n)) * n == array.size
    assert small.share_shape(array, None, 2) == small.share_shape(array, Once(), 2) == (6, 4, 8)


def test_the_table_is_read_against_the_model_and_not_the_config():
    """A layer with fewer heads than the config says is planned, or refused, by what it has."""

    def change(model: nn.Module) -> None:
        model.model.layers[1].self_attn.n_kv_heads = 1

    found = reasons(lambda: small.plan_of(small.resolve(small.LLAMA), change=change))
    assert found
    assert all(re.search(r"layers\.1\.", line) for line in found)


def test_two_placements_of_one_module_are_told_apart():
    """A dotted entry places a grandchild, and another entry its sibling."""
    model = load.lazy(small.resolve(small.LLAMA), values=False)
    table = small.table_of(small.resolve(small.LLAMA))
    flat = Block(
        "TransformerBlock",
        {
            "input_layernorm": replicated,
            "post_attention_layernorm": replicated,
            "mlp.gate_proj": column(),
            "mlp.up_proj": column(),
            "mlp.down_proj": replicated,
        },
    )
    rest = [block for block in table if block.cls not in {"TransformerBlock", "MLP"}]
    module = "mlx_lm.models.llama"
    plan = read_table(model, [*rest, flat], family="llama", strategy="flat", module=module).plan(2)
    assert plan.cuts["model.layers.0.mlp.gate_proj.weight"] == Cut(-2, 256)
    assert plan.cuts["model.layers.0.mlp.down_proj.weight"] is None
