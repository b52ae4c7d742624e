"""Taps see what passes through a model's blocks, can replace it, and leave no trace."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from harness.taps import (
    Block,
    Disturber,
    Forcer,
    Recorder,
    RecordsTooLargeError,
    Rounding,
    Visit,
    find_blocks,
    first_array,
    layers_of,
    tapped,
    widest_reduction,
    with_first_array,
)
from sharding.forward import logits_of, make_cache
from tests.harness.small_models import deepseek_v4, llama

TOKENS = mx.array([[5, 9, 2, 77, 31, 8, 1, 64, 3, 12]])


def run(model: nn.Module, handler: Any, tokens: mx.array = TOKENS) -> mx.array:
    with tapped(model, handler):
        handler.begin(0)
        logits = logits_of(model(tokens, cache=make_cache(model)))
        mx.eval(logits)
    return logits


def test_blocks_are_attention_and_feed_forward_by_whatever_name():
    """Norms and hyper-connections are no blocks; attention and feed-forward are, in each family by its own names."""
    assert list(find_blocks(llama())) == [Block(i, m) for i in range(3) for m in ("self_attn", "mlp")]
    assert list(find_blocks(deepseek_v4())) == [Block(i, m) for i in range(4) for m in ("attn", "ffn")]


def test_recording_changes_nothing():
    """A tapped model computes bit by bit what it computes untapped."""
    for model in (llama(), deepseek_v4()):
        plain = logits_of(model(TOKENS, cache=make_cache(model)))
        assert mx.array_equal(run(model, Recorder()), plain)


def test_every_block_is_recorded_in_the_order_of_execution():
    """One record for each block and pass, numbered as they ran, with the block's own input and output."""
    model = llama()
    recorder = Recorder()
    run(model, recorder)
    visits = sorted(recorder.records, key=lambda v: recorder.records[v].order)
    assert [v.block for v in visits] == list(find_blocks(model))
    record = recorder.records[Visit(0, Block(1, "mlp"), 0)]
    assert mx.array_equal(model.layers[1].mlp(record.x), record.y)


def test_the_residual_of_a_short_prompt_is_handled():
    """DeepSeek V4 passes its feed-forward blocks the residual for prompts of 2 to 8 tokens, and forcing still holds."""
    model = deepseek_v4()
    recorder = Recorder()
    plain = run(model, recorder, TOKENS[:, :5])
    forcer = Forcer(recorder.records)
    assert mx.array_equal(run(model, forcer, TOKENS[:, :5]), plain)
    assert max(d.distance.max_abs for d in forcer.distances) == 0


def test_classes_are_put_back_even_after_an_error():
    """Whatever happens inside, the modules are of their own classes afterwards."""
    model = llama()
    before = [type(m) for m in find_blocks(model).values()]

    class Fail(Recorder):
        def __call__(self, block: Block, forward: Any, x: mx.array) -> Any:
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"), tapped(model, Fail()):
        model(TOKENS, cache=make_cache(model))
    assert [type(m) for m in find_blocks(model).values()] == before


def test_a_tapped_block_is_still_what_it_was():
    """Code that asks for a module's class or its name gets the same answer while it is tapped."""
    model = deepseek_v4()
    kind = type(model.layers[0].ffn)
    with tapped(model, Recorder()):
        assert isinstance(model.layers[0].ffn, kind)
        assert type(model.layers[0].ffn).__name__ == kind.__name__


def test_taps_do_not_nest():
    """Tapping a tapped model is refused, and the first taps keep working."""
    model = llama()
    recorder = Recorder()
    with tapped(model, recorder):
        with (
            pytest.raises(RuntimeError, match=r"layers\.0\.self_attn is tapped already"),
            tapped(model, Recorder()),
        ):
            pass
        model(TOKENS, cache=make_cache(model))
    assert len(recorder.records) == 6


def test_two_models_of_one_class_are_tapped_apart():
    """A tap belongs to one object: another model of the same classes is not seen."""
    model, other = llama(), llama(1)
    recorder = Recorder()
    with tapped(model, recorder):
        other(TOKENS, cache=make_cache(other))
    assert not recorder.records


def test_forcing_isolates_a_fault():
    """With the reference's data forced, one broken block differs and no later one does."""
    model = llama()
    recorder = Recorder()
    plain = run(model, recorder)
    model.layers[1].mlp.down_proj.weight = model.layers[1].mlp.down_proj.weight * 1.01
    forcer = Forcer(recorder.records)
    logits = run(model, forcer)
    off = {(str(d.visit.block), d.what) for d in forcer.distances if d.distance.max_abs > 0}
    assert off == {("layers.1.mlp", "output")}
    assert mx.array_equal(logits, plain)


def test_a_fault_between_blocks_shows_as_an_input():
    """A wrong norm before a block is found in what arrives there, and not blamed on the block."""
    model = llama()
    recorder = Recorder()
    run(model, recorder)
    norm = model.layers[2].post_attention_layernorm
    norm.weight = norm.weight * 1.01
    forcer = Forcer(recorder.records)
    run(model, forcer)
    off = {(str(d.visit.block), d.what) for d in forcer.distances if d.distance.max_abs > 0}
    assert off == {("layers.2.mlp", "input")}


def test_an_input_of_another_shape_is_reported_and_left_alone():
    """A block that is given a cut input runs freely and is named as not compared."""
    model = llama()
    recorder = Recorder()
    run(model, recorder)
    forcer = Forcer(recorder.records)
    run(model, forcer, TOKENS[:, :4])
    assert not forcer.distances
    assert "(1, 4, 64), in the whole model (1, 10, 64)" in forcer.unlike[Block(0, "self_attn")]


def test_records_are_bounded():
    """A prompt beyond the limit is refused in words; a later pass beyond it is left out whole, with all after it."""
    model = llama()
    with pytest.raises(RecordsTooLargeError, match="fewer prompt tokens"):
        run(model, Recorder(max_bytes=10_000))
    # One pass of ten tokens: 6 blocks, input and output, 64 values of 4 bytes.
    one_pass = 6 * 2 * 10 * 64 * 4
    recorder = Recorder(max_bytes=one_pass + 1000)
    cache = make_cache(model)
    with tapped(model, recorder):
        for call in range(3):
            recorder.begin(call)
            mx.eval(model(TOKENS if call == 0 else TOKENS[:, :1], cache=cache))
    assert not recorder.complete
    assert {v.call for v in recorder.records} == {0}


def test_several_results_are_forced_in_the_first_only():
    """Of a block's tuple the first array is its output; the rest, keys and values say, stay the rank's own."""
    keys = mx.ones((2, 2))
    output = (mx.zeros((1, 2)), (keys, 3))
    forced = with_first_array(output, mx.ones((1, 2)))
    assert first_array(forced).tolist() == [[1, 1]]
    assert forced[1][0] is keys
    assert forced[1][1] == 3
    with pytest.raises(TypeError, match="holds no array"):
        first_array((None, 3))


def test_an_input_by_keyword_is_found():
    """A block whose layer passes its input by name is tapped like any other."""
    model = llama()
    layer = model.layers[0]
    recorder = Recorder()
    with tapped(model, recorder):
        layer.mlp(x=mx.ones((1, 2, 64)))
        with pytest.raises(TypeError, match=r"layers\.0\.mlp was called without an array"):
            layer.mlp(None)
    assert recorder.records[Visit(0, Block(0, "mlp"), 0)].x.shape == (1, 2, 64)


def test_layers_keep_their_numbers_under_pipelining():
    """A rank that holds the last layers only numbers them as in the whole model."""

    class Group:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

    model = deepseek_v4()
    model.model.pipeline(Group())
    assert [n for n, _ in layers_of(model)] == [2, 3]
    with pytest.raises(ValueError, match="has no `layers`"):
        layers_of(nn.Linear(2, 2))


def test_rounding_moves_each_element_by_the_last_bit():
    """The disturbance is one rounding of the type, up or down, seeded, and not the same twice in a row."""
    x = mx.random.normal((1000,), key=mx.random.key(3))
    for dtype in (mx.float32, mx.bfloat16):
        values = x.astype(dtype)
        jitter = Rounding(0)
        once, twice, again = jitter(values), jitter(values), Rounding(0)(values)
        assert once.dtype == dtype
        relative = mx.abs(once - values).astype(mx.float32) / mx.abs(values).astype(mx.float32)
        assert mx.all(relative > 0).item()
        assert float(np.array(relative.max())) <= 2.01 * mx.finfo(dtype).eps
        assert mx.array_equal(once, again)
        assert not mx.array_equal(once, twice)


def test_a_disturbed_model_runs_freely():
    """Disturbing every block moves the logits a little, and the model is itself again afterwards."""
    model = llama()
    plain = run(model, Recorder())
    moved = run(model, Disturber(Rounding(0)))
    assert 0 < float(np.array(mx.abs(moved - plain).max())) < 1e-3
    assert mx.array_equal(run(model, Recorder()), plain)


def test_the_widest_reduction_is_read_from_the_weights():
    """The number of terms that a block adds up is its widest weight's, packed or not."""
    model = llama()
    assert widest_reduction(model.layers[0].mlp) == 128
    nn.quantize(model, group_size=64, bits=4)
    assert widest_reduction(model.layers[0].mlp) == 128
