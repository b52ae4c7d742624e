"""Checkpoints as mlx-community publishes them, whole, torn and mislabelled; and what loading takes in memory."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from sharding import costs, load, lockstep, rows, strategies, synth
from sharding import source as sources
from sharding.errors import BadRequest
from sharding.trace import StandInGroup
from sharding.tree import parameters_of
from tests.sharding import small
from tests.sharding.checkpoints import equal, loaded, tensors, write

OVERRIDES = {
    "group_size": 64,
    "bits": 4,
    "mode": "affine",
    "lm_head": {"group_size": 32, "bits": 8, "mode": "affine"},
    "model.layers.1.mlp.up_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "model.layers.0.mlp.down_proj": False,
}
"""A `quantization` section with every kind of override."""


def refused(folder: Path, *words: str, **options: Any) -> None:
    """Assert that a checkpoint is refused in one line with these words in it."""
    with pytest.raises(BadRequest) as caught:
        loaded(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(folder), *words):
        assert word in message


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        (small.BIASED, None),
        (small.LLAMA, OVERRIDES),
        (small.V4, None),
        (small.TIED, {"group_size": 64, "bits": 3}),
    ],
)
def test_a_checkpoint_loads_what_was_written(tmp_path, config, quantization, index):
    """Shards with or without an index, quantised with overrides or not, load as the very weights they were made of."""
    arrays = tensors(config, quantization)
    stored = config if quantization is None else {**config, "quantization": quantization}
    folder = write(tmp_path / "model", stored, arrays, index=index)
    assert equal(loaded(folder), arrays)


def test_a_vision_wrappers_prefix_is_taken_off(tmp_path):
    """mlx-vlm stores a language model's weights under `language_model.`; they are the same weights."""
    arrays = tensors(small.V4)
    assert equal(loaded(write(tmp_path / "model", small.V4, arrays, prefix="language_model.")), arrays)


def test_a_vision_wrappers_prefix_is_taken_off_the_overrides_too(tmp_path):
    """Overrides of such a checkpoint carry the prefix as its weights do."""
    arrays = tensors(small.LLAMA, OVERRIDES)
    prefixed = {
        (f"language_model.{key}" if "." in key or key == "lm_head" else key): value
        for key, value in OVERRIDES.items()
    }
    stored = {**small.LLAMA, "quantization": prefixed}
    assert equal(loaded(write(tmp_path / "model", stored, arrays, prefix="language_model.")), arrays)


def per_expert(arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """V4's tensors as the release stores them: one an expert, under the release's names."""
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    result = {}
    for path, array in arrays.items():
        if ".switch_mlp." in path:
            layer, _, rest = path.removeprefix("model.").partition(".ffn.switch_mlp.")
            for expert in range(array.shape[0]):
                result[f"{layer}.ffn.experts.{expert}.{names[rest.split('.')[0]]}.weight"] = array[expert]
        else:
            result[path] = array
    return result


def test_a_release_with_one_tensor_an_expert_loads(tmp_path):
    """The model's own sanitize stacks the release's experts."""
    arrays = tensors(small.V4)
    assert equal(loaded(write(tmp_path / "model", small.V4, per_expert(arrays))), arrays)


def test_a_missing_expert_is_refused(tmp_path):
    """One expert that is not there is one line, though the model's own code falls over it."""
    arrays = per_expert(tensors(small.V4))
    del arrays["layers.2.ffn.experts.3.w2.weight"]
    refused(write(tmp_path / "model", small.V4, arrays), "experts.3.w2")


def test_kept_layers_get_the_weights_of_their_originals(tmp_path):
    """--layers on a checkpoint loads the tensors of the layers that stay, under their new numbers."""
    arrays = tensors(small.MISTRAL)
    folder = write(tmp_path / "model", small.MISTRAL, arrays)
    kept = loaded(folder, layers=2)
    for path, array in kept.items():
        assert mx.array_equal(array, arrays[path.replace("layers.1.", "layers.2.")]).item(), path


def test_kept_layers_keep_their_quantisation(tmp_path):
    """--layers renumbers the overrides of `quantization` as it renumbers the layers."""
    quantization = {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "model.layers.2.mlp.up_proj": {"group_size": 32, "bits": 8, "mode": "affine"},
    }
    arrays = tensors(small.MISTRAL, quantization)
    folder = write(tmp_path / "model", {**small.MISTRAL, "quantization": quantization}, arrays)
    kept = loaded(folder, layers=2)
    name = "mlp.up_proj.weight"
    assert mx.array_equal(kept[f"model.layers.1.{name}"], arrays[f"model.layers.2.{name}"]).item()


@pytest.mark.parametrize("size", [0, 3, 8, 50, 0.5, -1])
def test_a_torn_shard_is_refused(tmp_path, size):
    """A shard cut off anywhere, in its header, its data or its last byte, is refused before anything is computed."""
    folder = write(tmp_path / "model", small.LLAMA, tensors(small.LLAMA))
    shard = folder / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    length = int(len(content) * size) if isinstance(size, float) else size
    shard.write_bytes(content[:length])
    refused(folder, "model-00002-of-00003.safetensors", "fetch the checkpoint again")


@pytest.mark.parametrize("content", [b"\0" * 400, b"\xff" * 400, b"<html>not found</html>" * 20])
def test_a_shard_that_is_something_else_is_refused(tmp_path, content):
    """A file that is no safetensors file, such as a saved error page, is refused by name."""
    folder = write(tmp_path / "model", small.LLAMA, tensors(small.LLAMA))
    (folder / "model-00001-of-00003.safetensors").write_bytes(content)
    refused(folder, "model-00001-of-00003.safetensors")


def test_a_shard_that_is_not_there_is_refused(tmp_path):
    """A shard that the index names and the folder lacks is refused by name."""
    folder = write(tmp_path / "model", small.LLAMA, tensors(small.LLAMA))
    (folder / "model-00003-of-00003.safetensors").unlink()
    refused(folder, "model-00003-of-00003.safetensors")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"weight_map": 5}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": null}}',
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": "absent.safetensors"}}',
    ],
)
def test_a_bad_index_is_refused(tmp_path, text):
    """An index that is none, or that names no shards of this folder, is refused."""
    folder = write(tmp_path / "model", small.LLAMA, tensors(small.LLAMA))
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder)


def harmed(harm: str) -> dict[str, mx.array]:
    """Tensors of a small llama with one thing wrong."""
    arrays = dict(tensors(small.LLAMA))
    name = "model.layers.1.mlp.up_proj.weight"
    if harm == "missing":
        del arrays[name]
    elif harm == "extra":
        arrays["model.layers.1.mlp.up_proj.bias"] = mx.zeros(256)
    elif harm == "layer":
        arrays["model.layers.2.mlp.up_proj.weight"] = arrays[name]
    elif harm == "shape":
        arrays[name] = arrays[name].T
    elif harm == "renamed":
        arrays["model.layers.1.mlp.upproj.weight"] = arrays.pop(name)
    return arrays


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("missing", "lacks model.layers.1.mlp.up_proj.weight"),
        ("extra", "has unknown model.layers.1.mlp.up_proj.bias"),
        ("layer", "has unknown model.layers.2.mlp.up_proj.weight"),
        ("shape", "has wrongly shaped model.layers.1.mlp.up_proj.weight"),
        ("renamed", "lacks model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(tmp_path, harm, words):
    """A tensor too few, too many or of another shape is refused by name: nothing is left at its initial value."""
    refused(write(tmp_path / "model", small.LLAMA, harmed(harm)), words)


def test_a_config_that_hides_the_quantisation_is_refused(tmp_path):
    """Quantised weights without `quantization` in the config are refused."""
    refused(write(tmp_path / "model", small.LLAMA, tensors(small.LLAMA, OVERRIDES)))


def test_a_config_of_another_size_is_refused(tmp_path):
    """--set can't make real weights fit another model."""
    folder = write(tmp_path / "model", small.LLAMA, tensors(small.LLAMA))
    refused(folder, "wrongly shaped", sets=["intermediate_size=128"])


def test_weights_of_another_kind_are_refused(tmp_path):
    """Integers where the model has floats are no weights of it, though the shape is right."""
    arrays = {**tensors(small.LLAMA), "model.norm.weight": mx.ones(64, mx.int32)}
    refused(write(tmp_path / "model", small.LLAMA, arrays), "model.norm.weight")


@pytest.mark.parametrize(
    ("config", "quantize", "strategy"),
    [
        (small.BIASED, None, "tensor"),
        (small.LLAMA, "4bit", "tensor"),
        (small.V4_WIDE, "mxfp4", "gathered-wo_b"),
    ],
)
def test_what_synth_writes_is_what_it_was_given(tmp_path, config, quantize, strategy):
    """A synthetic checkpoint loads as the random model it was written from, whole and split."""
    source = small.resolve(config, quantize=quantize, seed=4)
    files = synth.write(source, tmp_path / "model", shard_bytes=2**17)
    assert sum(file.suffix == ".safetensors" for file in files) > 1
    again = sources.resolve(str(tmp_path / "model"), dtype="float32")
    assert again.quantization == source.quantization
    assert small.same_parameters(small.whole(again), small.whole(source))
    assert small.distance(small.split(again, strategy, 2, (9, 1)), source, (9, 1)) <= small.TOLERANCE


def test_mlx_lm_loads_what_synth_writes(tmp_path):
    """mlx-lm's own loader takes a synthetic checkpoint for what mlx-community publishes, to the bit."""
    from mlx_lm.utils import load_model

    source = small.resolve(small.LLAMA, quantize="4bit", seed=4)
    synth.write(source, tmp_path / "model", shard_bytes=2**17)
    model, config = load_model(tmp_path / "model")
    assert config["quantization"]["bits"] == 4
    assert small.same_parameters(model, small.whole(source))


def test_synth_writes_all_or_nothing(tmp_path, monkeypatch):
    """When writing fails half way, no folder is left, finished or not; and nothing is overwritten."""
    source = small.resolve(small.LLAMA)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", full)
        with pytest.raises(BadRequest, match="No space left"):
            synth.write(source, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    synth.write(source, tmp_path / "model")
    with pytest.raises(BadRequest, match="exists already"):
        synth.write(source, tmp_path / "model")


@pytest.mark.parametrize(
    "quantization",
    [
        OVERRIDES,
        pytest.param({key: value for key, value in OVERRIDES.items() if value is not False}),
    ],
)
def test_the_plan_of_a_checkpoint_is_of_its_real_shapes(tmp_path, quantization):
    """What a checkpoint leaves unquantised, whether or not its config says so, is planned with its real bytes."""
    arrays = tensors(small.LLAMA, OVERRIDES)
    folder = write(tmp_path / "model", {**small.LLAMA, "quantization": quantization}, arrays)
    source = sources.resolve(str(folder), dtype="float32")
    (row,) = rows.make_rows(source, [strategies.resolve("tensor", "llama")], [1], [1], [4])
    assert row.weight_bytes_per_rank == (sum(array.nbytes for array in arrays.values()),)


def test_every_rank_of_a_checkpoint_holds_its_share_alone(tmp_path):
    """Ranks that load from the same files have slices that make up the files, and agree."""
    arrays = tensors(small.LLAMA)
    source = sources.resolve(str(write(tmp_path / "model", small.LLAMA, arrays)), dtype="float32")
    found = strategies.resolve("tensor", "llama")
    parts = lockstep.run(2, lambda g: parameters_of(found.apply(load.lazy(source), g)))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert mx.array_equal(mx.concatenate([part[name] for part in parts]), arrays[name]).item()


DEEP = {
    **small.LLAMA,
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "vocab_size": 64,
}


def peak(make) -> int:
    """Bytes allocated at the worst moment of a call, beyond what was there before."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    kept = make()
    result = mx.get_peak_memory() - before
    del kept
    return result


@pytest.mark.parametrize("kind", ["random", "checkpoint"])
def test_loading_peaks_near_one_share_and_one_layer(tmp_path, kind):
    """A rank never has more in memory than its share and one whole layer, from random weights or from files."""
    source = small.resolve(DEEP)
    if kind == "checkpoint":
        synth.write(source, tmp_path / "model")
        source = sources.resolve(str(tmp_path / "model"), dtype="float32")
    whole = costs.parameters(load.lazy(source, values=False))
    planned = costs.planned_weights(whole, small.plan_of(source, ranks=4), 1, 0)
    total = sum(p.nbytes for p in whole)
    assert planned.load_peak < total / 2
    worst = peak(lambda: strategies.resolve("tensor", "llama").apply(load.lazy(source), StandInGroup(3, 4)))
    # One array of the layer exists a second time while it is made and cut.
    largest = max(p.nbytes for p in whole)
    assert planned.held <= worst <= planned.load_peak + largest + 2**20
    assert worst < total * 0.6


def test_the_planned_peak_includes_what_is_quantised_on_the_way():
    """Quantising while loading has a layer's float weights in memory, and the plan's peak says so."""
    source = small.resolve(DEEP, quantize="4bit")
    whole = costs.parameters(load.lazy(source, values=False))
    planned = costs.planned_weights(whole, small.plan_of(source), 1, 0, quantising=True)
    worst = peak(lambda: strategies.resolve("tensor", "llama").apply(load.lazy(source), StandInGroup(1, 2)))
    assert worst <= planned.load_peak + 2**20


def test_settling_goes_layer_by_layer(tmp_path):
    """The whole model at one rank is loaded without a second copy of it."""
    synth.write(small.resolve(DEEP), tmp_path / "model")
    source = sources.resolve(str(tmp_path / "model"), dtype="float32")
    total = sum(p.nbytes for p in costs.parameters(load.lazy(source, values=False)))
    assert peak(lambda: small.whole(source)) <= total + 2**20
