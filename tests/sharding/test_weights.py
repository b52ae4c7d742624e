"""Random weights: random everywhere, and the same wherever they are made."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from sharding import load, models, strategies, weights
from sharding.errors import BadRequest
from sharding.trace import StandInGroup
from sharding.tree import parameters_of
from tests.sharding import small

CONFIGS = {"biased": small.BIASED, "qwen3": small.QWEN3, "v4": small.V4_BIASED}


def values(config, seed=0, **options):
    """The random parameters of a small model."""
    return parameters_of(small.whole(small.resolve(config, seed=seed, **options)))


@pytest.mark.parametrize("name", CONFIGS)
def test_no_parameter_keeps_an_initial_value(name):
    """Norms, biases, sinks, gates, corrections and hash tables: none is zero, one, or constant anywhere."""
    for path, array in values(CONFIGS[name]).items():
        if mx.issubdtype(array.dtype, mx.floating):
            assert mx.all(array != 0).item(), path
            assert mx.all(array != 1).item(), path
        if array.size > 1:
            assert mx.any(array != array.reshape(-1)[0]).item(), path
            assert array.size < 100 or len(set(array.reshape(-1)[:100].tolist())) > 5, path


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_differs_from_every_other(name):
    """No two arrays are copies of one another, though they have the same shape."""
    seen: dict[tuple, str] = {}
    for path, array in values(CONFIGS[name]).items():
        key = (tuple(array.shape), str(array.reshape(-1).tolist()))
        assert key not in seen, f"{path} equals {seen[key]}"
        seen[key] = path


@pytest.mark.parametrize("name", CONFIGS)
def test_the_seed_decides_every_parameter(name):
    """The same seed gives the same bits; another seed gives others in every array."""
    first, again, other = (values(CONFIGS[name], seed) for seed in (3, 3, 4))
    for path, array in first.items():
        assert mx.array_equal(array, again[path]).item(), path
        assert not mx.array_equal(array, other[path]).item(), path


def test_the_world_size_decides_nothing():
    """Each rank of any world cuts its share out of the same whole."""
    source = small.resolve(small.V4, seed=9)
    whole = parameters_of(small.whole(source))
    for ranks in (2, 4):
        plan = small.plan_of(source, ranks=ranks)
        for rank in range(ranks):
            model = strategies.resolve("tensor", source.model_type).apply(
                load.lazy(source), StandInGroup(rank, ranks)
            )
            for path, array in parameters_of(model).items():
                cut = plan.cuts[path]
                expected = whole[path] if cut is None else cut.take(whole[path], rank, ranks)
                assert mx.array_equal(array, expected).item(), path


def test_a_parameter_does_not_depend_on_the_rest_of_the_model():
    """A model with fewer layers has the same weights in the layers that it has."""
    deep, shallow = values({**small.LLAMA, "num_hidden_layers": 3}), values(small.LLAMA)
    assert all(mx.array_equal(array, deep[path]).item() for path, array in shallow.items())


def test_weights_do_not_touch_the_global_random_state():
    """Nothing is drawn from mx.random's own state, and nothing depends on it."""
    mx.random.seed(1)
    first = values(small.LLAMA)
    drawn = mx.random.uniform().item()
    mx.random.seed(2)
    second = values(small.LLAMA)
    assert all(mx.array_equal(array, second[path]).item() for path, array in first.items())
    mx.random.seed(1)
    models.build(dict(small.LLAMA))  # the classes' own initial values are drawn from it
    assert mx.random.uniform().item() == drawn


@pytest.mark.parametrize(("width", "columns"), [(8, 2), (8, 6), (6, 6), (256, 6), (3, 2)])
def test_hash_tables_name_existing_experts_once_a_token(width, columns):
    """A token's experts are within range and distinct, and all experts are in use."""
    table = weights._distinct((512, columns), width, mx.random.key(3))
    rows: Any = table.tolist()
    assert all(len(set(row)) == columns for row in rows)
    used = {expert for row in rows for expert in row}
    assert used <= set(range(width))
    assert len(used) == width


def test_an_integer_parameter_of_unknown_range_is_refused():
    """An integer parameter that no family describes gets no invented value."""
    model = nn.Linear(2, 2)
    model.table = mx.zeros((4,), mx.int32)
    with pytest.raises(BadRequest, match="table: integer parameter of Linear with unknown range"):
        weights.randomize(model, 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_activations_stay_of_the_size_of_one(name):
    """Logits have about unit spread and are finite, so that differences are of something."""
    output = small.reference(small.resolve(CONFIGS[name]))
    assert mx.all(mx.isfinite(output)).item()
    assert 0.3 < small.number(mx.std(output)) < 3


def test_a_cast_leaves_what_the_model_keeps_in_float32():
    """V4's sinks, corrections and hyper-connections stay float32; everything else takes the dtype."""
    array = values(small.V4, dtype="bfloat16")
    kept = ("attn_sink", "e_score_correction_bias", "_hc.", "hc_head.")
    for path, value in array.items():
        if "tid2eid" in path:
            assert value.dtype == mx.int32
        else:
            assert (value.dtype == mx.float32) == any(word in path for word in kept), path
            assert value.dtype in (mx.float32, mx.bfloat16), path


def test_a_cast_of_the_dense_families_takes_everything():
    """llama has nothing to keep in float32."""
    assert {value.dtype for value in values(small.BIASED, dtype="float16").values()} == {mx.float16}


def test_quantised_weights_are_the_quantised_random_weights():
    """--quantize quantises the very weights that the float model has."""
    plain, packed = values(small.LLAMA, seed=2), values(small.LLAMA, seed=2, quantize="8bit")
    name = "model.layers.0.self_attn.q_proj"
    expected = mx.quantize(plain[f"{name}.weight"], group_size=64, bits=8)
    for own, array in zip(("weight", "scales", "biases"), expected, strict=True):
        assert mx.array_equal(packed[f"{name}.{own}"], array).item()
