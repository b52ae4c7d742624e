"""Correct splits pass; every fault is wrong, and found where it is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from harness.equivalence import Report, merge, verify
from harness.prompts import random_prompt
from harness.reference import Reference, take_reference
from tests.harness.small_models import (
    VOCABULARY,
    SplitLinear,
    deepseek_v4,
    gemma3,
    llama,
    replace_call,
    split_llama,
    split_v4,
)

BUILDERS = {"llama": (llama, split_llama), "gemma3": (gemma3, split_llama), "v4": (deepseek_v4, split_v4)}
PROMPT = mx.array(random_prompt(VOCABULARY, 2, 21, seed=0))


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {name: take_reference(build(), PROMPT, 6, draws=2) for name, (build, _) in BUILDERS.items()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_correct_split_is_ok(references, name, ranks):
    """Sums in another order pass with room to spare, every block of every pass having been compared."""
    build, split = BUILDERS[name]
    report = verify(split(build(), ranks), references[name])
    assert (report.outcome, report.reasons, report.first_divergence) == ("ok", (), None)
    assert 0 < report.relative_diff < report.tolerance / 4
    assert report.top1_agreement == 1
    assert report.blocks_compared == {str(b): 7 for b in references[name].blocks}


def test_the_unsharded_model_itself_is_exactly_ok(references):
    """The model beside its own reference differs by nothing at all."""
    report = verify(llama(), references["llama"])
    assert (report.outcome, report.max_abs_diff, report.kl) == ("ok", 0, 0)


def zero_half_of_o_proj(model: Any) -> None:
    weight = model.layers[1].self_attn.o_proj.weight
    model.layers[1].self_attn.o_proj.weight = mx.concatenate([weight[:, :32], mx.zeros((64, 32))], axis=1)


def swap_two_heads(model: Any) -> None:
    q = model.layers[2].self_attn.q_proj
    order = mx.array([*range(16, 32), *range(16), *range(32, 64)])
    q.weight, q.bias = q.weight[order], q.bias[order]


def lose_a_bias(model: Any) -> None:
    o = model.layers[0].self_attn.o_proj
    o.bias = mx.zeros_like(o.bias)


def add_a_bias_twice(model: Any) -> None:
    o = model.layers[0].self_attn.o_proj
    o.bias = 2 * o.bias


def scale_slightly(model: Any) -> None:
    down = model.layers[1].mlp.down_proj
    down.weight = down.weight * 1.002


def stale_position(model: Any) -> None:
    """Decode steps of one layer rotate as if one token fewer had been seen."""
    replace_call(
        model.layers[1].self_attn.rope, lambda call, x, offset=0: call(x, offset=offset - 1 if offset else 0)
    )


def forget_the_last_key(model: Any) -> None:
    """Decode steps of one layer attend to a cache whose newest entry is the one before."""

    def call(original: Callable[..., Any], x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        out = original(x, mask, cache)
        if x.shape[1] == 1:
            cache.keys[..., cache.offset - 1, :] = cache.keys[..., cache.offset - 2, :]
        return out

    replace_call(model.layers[2].self_attn, call)


def decode_only(model: Any) -> None:
    replace_call(model.layers[0].mlp, lambda call, x: call(x) * (1.003 if x.shape[1] == 1 else 1))


def poison(model: Any) -> None:
    down = model.layers[2].mlp.down_proj
    down.weight = mx.where(mx.arange(64)[:, None] == 3, float("nan"), down.weight)


def wrong_norm(model: Any) -> None:
    norm = model.layers[1].post_attention_layernorm
    norm.weight = norm.weight * 1.01


def wrong_embedding(model: Any) -> None:
    embed = model.model.embed_tokens
    embed.weight = embed.weight[(mx.arange(VOCABULARY) + 1) % VOCABULARY]


def swap_vocabulary(model: Any) -> None:
    rows = mx.concatenate([mx.arange(64, 128), mx.arange(64)])
    model.lm_head.weight = model.lm_head.weight[rows]


LLAMA_FAULTS = {
    zero_half_of_o_proj: (1, "self_attn", "in the prompt"),
    swap_two_heads: (2, "self_attn", "in the prompt"),
    lose_a_bias: (0, "self_attn", "in the prompt"),
    add_a_bias_twice: (0, "self_attn", "in the prompt"),
    scale_slightly: (1, "mlp", "in the prompt"),
    stale_position: (1, "self_attn", "at decode step 1"),
    forget_the_last_key: (2, "self_attn", "at decode step 2"),
    decode_only: (0, "mlp", "at decode step 1"),
    poison: (2, "mlp", "in the prompt"),
    wrong_norm: (1, "input of mlp", "in the prompt"),
    wrong_embedding: (0, "input of self_attn", "in the prompt"),
    swap_vocabulary: (None, "head", "in the prompt"),
}


@pytest.mark.parametrize("fault", LLAMA_FAULTS, ids=lambda f: f.__name__)
def test_a_fault_is_wrong_and_located(references, fault):
    """Each injected fault, in an otherwise correct split, is found in the block and pass where it first acts."""
    layer, module, when = LLAMA_FAULTS[fault]
    model = llama()
    fault(model)
    report = verify(model, references["llama"])
    assert report.outcome == "wrong"
    assert report.first_divergence == {"layer": layer, "module": module}
    assert when in report.reasons[0]


def test_a_fault_is_found_beside_a_correct_split(references):
    """Row-parallel sums elsewhere don't blur the place."""
    model = split_llama(llama(), 2)
    scale = model.layers[1].mlp.down_proj.parts
    model.layers[1].mlp.down_proj.parts = [scale[0], scale[1] * 1.01]
    report = verify(model, references["llama"])
    assert report.first_divergence == {"layer": 1, "module": "mlp"}
    assert [r.split(":")[0] for r in report.reasons] == [
        "layer 1 mlp in the prompt",
        "end to end in the prompt",
    ]


def v4_sinks(model: Any) -> None:
    model.layers[0].attn.attn_sink = mx.roll(model.layers[0].attn.attn_sink, 1)


def v4_shared_expert_twice(model: Any) -> None:
    down = model.layers[2].ffn.shared_experts.down_proj
    down.parts = [2 * part for part in down.parts]


def v4_router_bias(model: Any) -> None:
    gate = model.layers[1].ffn.gate
    gate.e_score_correction_bias = mx.zeros_like(gate.e_score_correction_bias)


def v4_expert_slice(model: Any) -> None:
    up = model.layers[3].ffn.switch_mlp.up_proj
    up.weight = mx.concatenate([up.weight[:, 16:], up.weight[:, :16]], axis=1)


V4_FAULTS = {
    v4_sinks: (0, "attn"),
    v4_shared_expert_twice: (2, "ffn"),
    v4_router_bias: (1, "ffn"),
    v4_expert_slice: (3, "ffn"),
}


@pytest.mark.parametrize("fault", V4_FAULTS, ids=lambda f: f.__name__)
def test_a_fault_in_deepseek_v4_is_located(references, fault):
    """The same through hyper-connections, hash and top-k routing, and pooled caches."""
    model = split_v4(deepseek_v4(), 2)
    fault(model)
    report = verify(model, references["v4"])
    layer, module = V4_FAULTS[fault]
    assert (report.outcome, report.first_divergence) == ("wrong", {"layer": layer, "module": module})
    assert report.divergence is not None
    assert report.divergence.distance.relative > 30 * report.divergence.tolerance.relative


def test_a_fault_too_small_for_any_token_is_wrong(references):
    """All greedy tokens the same, logits off by less than a tenth: still wrong, and located."""
    model = llama()
    scale_slightly(model)
    report = verify(model, references["llama"])
    assert report.top1_agreement == 1
    assert report.max_abs_diff < 0.1
    assert report.outcome == "wrong"
    assert report.relative_diff > 10 * report.tolerance


def test_a_fault_that_comes_and_goes_is_wrong(references):
    """A race that strikes after the blocks were compared is still seen at the end."""
    model = split_llama(llama(), 2)
    calls = {"n": 0}

    def race(call: Callable[..., Any], x: mx.array) -> Any:
        calls["n"] += 1
        return call(x) * (
            1.01 if calls["n"] == 10 else 1
        )  # seven passes with blocks forced, then the free ones

    replace_call(model.layers[1].mlp, race)
    report = verify(model, references["llama"])
    assert report.outcome == "wrong"
    assert report.first_divergence == {"layer": None, "module": "end to end"}
    assert "end to end at decode step 2" in report.reasons[0]


def test_logits_of_another_shape_are_wrong(references):
    """A head that gives fewer tokens, or only the last position, can't pass by having less to compare."""
    for cut in (lambda y: y[..., :100], lambda y: y[:, -1:], lambda y: y[:0], lambda y: y[0]):
        model = llama()
        replace_call(model, lambda call, x, cache=None, cut=cut: cut(call(x, cache=cache)))
        report = verify(model, references["llama"])
        assert report.outcome == "wrong"
        assert "instead of" in report.reasons[0]
        assert math.isinf(report.max_abs_diff)


def test_not_finite_logits_are_wrong(references):
    """NaN or an infinity in one logit of one step is enough."""
    for bad in (float("nan"), float("inf"), -float("inf")):
        model = llama()

        def call(original: Callable[..., Any], x: mx.array, cache: Any = None, bad: float = bad) -> Any:
            y = original(x, cache=cache)
            return mx.where(mx.arange(VOCABULARY) == 7, bad, y) if cache[0].offset == 24 else y

        replace_call(model, call)
        report = verify(model, references["llama"])
        assert report.outcome == "wrong"
        assert "not finite" in " ".join(report.reasons)


def test_a_model_without_the_same_blocks_is_judged_by_its_end(references):
    """Where a strategy renames blocks the logits decide, right or wrong, and the report says what wasn't compared."""

    class Renamed(nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.renamed_attn, self.renamed_mlp, self.use_sliding = layer.self_attn, layer.mlp, False
            self.before_attn, self.before_mlp = layer.input_layernorm, layer.post_attention_layernorm

        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            h = x + self.renamed_attn(self.before_attn(x), mask, cache)
            return h + self.renamed_mlp(self.before_mlp(h))

    for fault, outcome in ((None, "ok"), (scale_slightly, "wrong")):
        model = split_llama(llama(), 2)
        if fault is not None:
            model.layers[1].mlp.down_proj.parts = [p * 1.01 for p in model.layers[1].mlp.down_proj.parts]
        model.model.layers = [Renamed(layer) for layer in model.model.layers]
        report = merge([verify(model, references["llama"])], [str(b) for b in references["llama"].blocks])
        assert report.outcome == outcome
        assert report.blocks_compared == {}
        assert "only the logits were compared" in report.notes[0]
        assert "6 of 6 blocks" in report.notes[-1]


def test_a_block_that_gets_part_of_the_batch_is_not_called_wrong(references):
    """A strategy that cuts the batch before a block and joins it after is right, and that block is noted."""
    model = llama()
    mlp = model.layers[1].mlp
    layer = model.layers[1]

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm, self.post_attention_layernorm = (
                layer.input_layernorm,
                layer.post_attention_layernorm,
            )
            self.self_attn, self.mlp = layer.self_attn, mlp
            self.use_sliding = layer.use_sliding

        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            h = x + self.self_attn(self.input_layernorm(x), mask, cache)
            n = self.post_attention_layernorm(h)
            return h + mx.concatenate([self.mlp(n[:1]), self.mlp(n[1:])])

    model.model.layers[1] = Halves()
    report = verify(model, references["llama"])
    assert report.outcome == "ok", report.reasons
    assert "layers.1.mlp gets (1, 21, 64)" in report.notes[0]


def test_a_block_of_another_output_shape_is_wrong(references):
    """A block that returns another shape for the reference's input is wrong there, even if the layer can add it."""
    model = llama()
    replace_call(model.layers[2].mlp, lambda call, x: call(x)[..., :1])  # broadcasts in the residual sum
    report = verify(model, references["llama"])
    assert report.first_divergence == {"layer": 2, "module": "mlp"}
    assert "shape (2, 21, 1) instead of (2, 21, 64)" in report.reasons[0]


def test_reports_of_ranks_become_one(references):
    """All ok and equal is ok; one wrong rank makes the job wrong and is named; the first place of any rank counts."""
    good = verify(split_llama(llama(), 2), references["llama"])
    assert merge([good, good]).outcome == "ok"
    assert (merge([good, good]).ranks_agree, merge([good, good]).ranks_bit_equal) == (True, True)
    model = llama()
    scale_slightly(model)
    bad = verify(model, references["llama"])
    merged = merge([good, bad])
    assert merged.outcome == "wrong"
    assert merged.reasons[0].startswith("rank 1: layer 1 mlp")
    assert merged.first_divergence == {"layer": 1, "module": "mlp"}
    assert merged.relative_diff == bad.relative_diff
    assert not merge([bad, bad]).reasons[0].startswith("rank")


def test_ranks_that_choose_different_tokens_are_wrong(references):
    """Each within tolerance by itself, but parted: generation would diverge. Equal tokens, other bits: a note."""
    report = verify(llama(), references["llama"])
    parted = merge([report, replace(report, tokens_digest="0" * 32, logits_digest="0" * 32)])
    assert (parted.outcome, parted.ranks_agree) == ("wrong", False)
    assert "choose different tokens" in parted.reasons[0]
    nearly = merge([report, replace(report, logits_digest="0" * 32)])
    assert (nearly.outcome, nearly.ranks_agree, nearly.ranks_bit_equal) == ("ok", True, False)
    assert "last bits" in nearly.notes[-1]


def test_reports_of_nothing_or_of_different_prompts_do_not_merge(references):
    """No rank, or ranks that ran something else, is an error and not a verdict."""
    report = verify(llama(), references["llama"])
    with pytest.raises(ValueError, match="no rank reported"):
        merge([])
    with pytest.raises(ValueError, match="same prompt"):
        merge([report, replace(report, prompt_digest="0" * 32)])


@pytest.mark.parametrize("fault", [None, scale_slightly, poison], ids=["ok", "wrong", "nan"])
def test_a_report_travels_as_json(references, fault):
    """Strict JSON, no Infinity or NaN in it, and read back equal."""
    model = llama()
    if fault:
        fault(model)
    report = verify(model, references["llama"])
    text = json.dumps(report.to_json(), allow_nan=False)
    assert Report.from_json(json.loads(text)) == report
    assert json.loads(text)["first_divergence"] == report.first_divergence


def test_a_report_cannot_contradict_itself(references):
    """Ok with reasons, or wrong without, can't be made."""
    report = verify(llama(), references["llama"])
    for changes in ({"outcome": "wrong"}, {"reasons": ("because",)}, {"outcome": "fine"}):
        with pytest.raises(ValueError, match=r"reasons|ok or wrong"):
            replace(report, **changes)


def test_quantised_weights_pass_and_fail_like_others():
    """4-bit weights with float32 activations: a split of their columns is ok, another expert slice is wrong."""

    class SplitQuantized(nn.Module):
        def __init__(self, whole: Any) -> None:
            super().__init__()
            self.whole = whole

        def __call__(self, x: mx.array) -> mx.array:
            total = mx.zeros(())
            for i in (0, 1):
                w, s, b = (
                    mx.split(a, 2, axis=-1)[i]
                    for a in (self.whole.weight, self.whole.scales, self.whole.biases)
                )
                half = mx.split(x, 2, axis=-1)[i]
                total = total + mx.quantized_matmul(half, w, s, b, transpose=True, group_size=32, bits=4)
            return total

    def quantised() -> Any:
        model = llama()
        nn.quantize(model, group_size=32, bits=4)
        return model

    reference = take_reference(quantised(), PROMPT, 3, draws=1)
    model = quantised()
    for layer in model.layers:
        layer.mlp.down_proj = SplitQuantized(layer.mlp.down_proj)
    assert verify(model, reference).outcome == "ok"
    scales = model.layers[1].mlp.down_proj.whole.scales
    model.layers[1].mlp.down_proj.whole.scales = scales[:, ::-1]
    assert verify(model, reference).first_divergence == {"layer": 1, "module": "mlp"}


def test_chunks_of_a_prompt_are_compared_like_the_whole():
    """With a prompt in several passes, a fault that acts from the second chunk on is found there."""
    reference = take_reference(llama(), PROMPT, 2, prefill_step=8, draws=1)
    assert verify(split_llama(llama(), 2), reference).outcome == "ok"
    model = llama()
    stale_position(model)
    report = verify(model, reference)
    assert report.first_divergence == {"layer": 1, "module": "self_attn"}
    assert report.divergence is not None
    assert report.divergence.call == 1


def test_the_split_used_here_is_a_split():
    """The helper of these tests holds partial weights that add up to the whole layer's result."""
    whole = nn.Linear(64, 8)
    x = mx.random.normal((3, 64), key=mx.random.key(0))
    assert mx.allclose(SplitLinear(whole, 4)(x), whole(x), atol=1e-5)
