"""SOURCE and what is changed of it; and everything that is no SOURCE, in one line each."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from sharding import load
from sharding import source as sources
from sharding.errors import BadRequest
from sharding.source import Source
from tests.sharding import small


def refused(call, *words: str) -> None:
    """Assert that a request is refused in one line with these words in it."""
    with pytest.raises(BadRequest) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def written(folder: Path, text: str) -> str:
    """Path of a `config.json` with this text."""
    path = folder / "config.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("text", ["/no/such/config.json", "nothing", "a/b/c", "no such/repo", "a\0b"])
def test_what_is_no_file_and_no_repo_is_refused(text):
    """A path that is not there and can't be a repo id is refused with its value."""
    refused(lambda: sources.resolve(text), "no such file or folder", repr(text))


@pytest.mark.parametrize("text", ["x" * 5000, "~no-such-user/config.json"])
def test_what_can_not_even_be_a_path_is_refused(text):
    """A name that the system can't look up is refused like one that is not there."""
    refused(lambda: sources.resolve(text), "SOURCE")


def test_a_folder_without_config_is_refused(tmp_path):
    """A folder is a checkpoint only with a config.json."""
    refused(lambda: sources.resolve(str(tmp_path)), "config.json: no such file")


@pytest.mark.parametrize("text", ["", "not json", '{"model_type": "llama"', "\x00"])
def test_what_is_not_json_is_refused(tmp_path, text):
    """A file that is no JSON is refused with its path."""
    path = written(tmp_path, text)
    refused(lambda: sources.resolve(path), path, "not a readable JSON file")


def test_bytes_that_are_not_text_are_refused(tmp_path):
    """A binary file is refused like any other that is no JSON."""
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00\x81")
    refused(lambda: sources.resolve(str(path)), "not a readable JSON file")


def test_json_that_is_nested_without_end_is_refused(tmp_path):
    """A file of nothing but brackets is refused like any other that is no JSON."""
    path = written(tmp_path, "[" * 100_000)
    refused(lambda: sources.resolve(path), "config.json")


@pytest.mark.parametrize(
    "text", ["{}", "[]", "3", '{"model_type": 5}', '{"model_type": null}', '"model_type"']
)
def test_a_config_without_model_type_is_refused(tmp_path, text):
    """JSON that names no model type is no config."""
    path = written(tmp_path, text)
    refused(lambda: sources.resolve(path), path, "model_type")


@pytest.mark.parametrize(
    "model_type", ["", "nope", "..", "a.b", "os", "LLAMA", "base", "cache", "rope_utils"]
)
def test_an_unknown_model_type_is_refused(model_type):
    """A model type that no library builds, or that is another module of theirs, is refused by name."""
    source = small.resolve({**small.LLAMA, "model_type": model_type})
    refused(lambda: load.lazy(source), model_type)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["hidden_size"], "expected key=value"),
        (["=3"], "expected key=value"),
        ([""], "expected key=value"),
        (["hiden_size=64"], "hiden_size"),
        (["rope_scaling.factor=2"], "no section 'rope_scaling'"),
        (["hidden_size.x=2"], "no section 'hidden_size'"),
    ],
)
def test_a_bad_set_is_refused(sets, words):
    """--set without a value, of a field that no one has, or below what is no section, is refused."""
    refused(lambda: small.resolve(small.LLAMA, sets=sets), "--set", words)


@pytest.mark.parametrize(
    "item",
    ["hidden_size=abc", "hidden_size=-1", "hidden_size=64.0", "num_attention_heads=0", "num_hidden_layers=0"],
)
def test_a_value_that_no_model_can_have_is_refused(item):
    """A value that the model's own code can't take is refused in one line, with the code's own reason."""
    refused(lambda: load.lazy(small.resolve(small.LLAMA, sets=[item])), "llama can't be built")


@pytest.mark.parametrize("value", ["5", "[1]", "null"])
def test_a_model_type_that_is_set_to_nonsense_is_refused(value):
    """--set model_type takes a string."""
    refused(lambda: load.lazy(small.resolve(small.LLAMA, sets=[f"model_type={value}"])), "model_type")


def test_set_changes_what_it_names_and_notes_it():
    """Values are JSON or strings, sections are reached with dots, and each change is noted with its old value."""
    config = {**small.LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}
    sets = ["hidden_size=32", "rope_scaling.factor=4.0", "tie_word_embeddings=true", "sliding_window=null"]
    source = small.resolve(config, sets=sets)
    assert source.config["hidden_size"] == 32
    assert source.config["rope_scaling"] == {"type": "linear", "factor": 4.0}
    assert source.config["tie_word_embeddings"] is True
    assert source.cuts == (
        "hidden_size 64 -> 32",
        "rope_scaling.factor 2.0 -> 4.0",
        "tie_word_embeddings False -> True",
        "sliding_window default -> None",
    )


@pytest.mark.parametrize("layers", [0, -1, 4, 1000])
def test_layers_that_can_not_be_kept_are_refused(layers):
    """--layers must leave each kind of layer and can't add any; the refusal says what would do."""
    refused(
        lambda: small.resolve(small.MISTRAL, layers=layers),
        f"--layers {layers}",
        "3 layers of 2 kinds",
        "choose 2 to 3",
    )


@pytest.mark.parametrize("layers", range(5, 12))
def test_layers_keep_every_kind(layers):
    """However few layers V4 keeps, it has each combination of compression and routing that the release has."""
    whole, cut = small.published("DeepSeek-V4-Flash"), small.published("DeepSeek-V4-Flash", layers=layers)

    def kinds(config):
        hashed = config["num_hash_layers"]
        return {(config["compress_ratios"][i], i < hashed) for i in range(config["num_hidden_layers"])}

    assert kinds(cut.config) == kinds(whole.config)
    assert cut.config["num_hidden_layers"] == len(cut.config["compress_ratios"]) == layers
    assert cut.kept is not None
    assert list(cut.kept) == sorted(set(cut.kept))
    assert [whole.config["compress_ratios"][i] for i in cut.kept] == cut.config["compress_ratios"]
    assert "num_hidden_layers" in cut.cuts[-1]
    assert f"-> {layers}" in cut.cuts[-1]
    assert len(load.lazy(cut, values=False).model.layers) == layers


def test_layers_rewrite_every_per_layer_list():
    """Lists with one entry a layer keep the entries of the layers that stay, in order."""
    source = small.resolve(small.MISTRAL, layers=2)
    assert source.kept == (0, 2)
    assert source.config["layer_types"] == ["sliding_attention", "full_attention"]


def test_a_list_that_is_as_long_by_chance_says_nothing_of_layers():
    """Three end-of-sequence ids of a model with three layers are not three kinds of layers."""
    config = {**small.LLAMA, "num_hidden_layers": 3, "eos_token_id": [1, 2, 3]}
    assert small.resolve(config, layers=1).config["eos_token_id"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("config", "sets"),
    [
        (small.V4, ["num_hidden_layers=100"]),
        ({k: v for k, v in small.V4.items() if k != "compress_ratios"}, []),
        ({**small.V4, "num_hash_layers": None}, []),
    ],
)
def test_layers_of_an_incomplete_config_are_kept_or_refused(config, sets):
    """--layers on a config whose per-layer lists are missing or short is a bad request, if it is not done right."""
    try:
        source = small.resolve(config, sets=sets, layers=4)
    except BadRequest:
        return
    assert source.config["num_hidden_layers"] == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantize": "3bit"}, "--quantize '3bit': unknown; choose one of 4bit, 8bit, mxfp4, mxfp8"),
        ({"dtype": "int8"}, "--dtype 'int8': unknown; choose one of float32, float16, bfloat16"),
    ],
)
def test_an_unknown_quantisation_or_dtype_is_refused(options, words):
    """What is not offered is refused with what is."""
    refused(lambda: small.resolve(small.LLAMA, **options), words)


def test_a_quantised_checkpoint_is_not_quantised_again():
    """--quantize on what is quantised already is refused."""
    config = {**small.LLAMA, "quantization": {"bits": 4, "group_size": 64}}
    refused(lambda: small.resolve(config, quantize="8bit"), "is quantised already")


@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 7, "group_size": 64},
        {"bits": 4, "group_size": 64, "mode": "fp3"},
        {"bits": 4, "group_size": 64, "lm_head": {"width": 3}},
        *(
            pytest.param(bad)
            for bad in ({"bits": 4}, {"group_size": 64}, "4bit", [1], {"bits": 4, "group_size": 0})
        ),
    ],
)
def test_a_bad_quantization_section_is_refused(settings):
    """A `quantization` that is not what mlx-lm writes is refused and quoted."""

    def build():
        source = small.resolve({**small.LLAMA, "quantization": settings})
        assert source.quantization
        load.lazy(source)

    refused(build, "quantization")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"bits": 4, "group_size": 64}, "4bit"),
        ({"bits": 6, "group_size": 32, "mode": "affine"}, "6bit"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "mxfp4"),
        (None, None),
    ],
)
def test_the_short_name_of_a_quantisation(settings, name):
    """Affine quantisations are named by their bits, the others by their mode."""
    config = small.LLAMA if settings is None else {**small.LLAMA, "quantization": settings}
    assert small.resolve(config).quantization == name


def test_another_librarys_quantisation_is_ignored_with_a_note():
    """The fp8 section of a release is left out and noted; one of mlx is kept."""
    source = small.published("DeepSeek-V4-Flash")
    assert "quantization_config" not in source.config
    assert source.notes == ("quantization_config (fp8) is another library's and is ignored",)
    ours = {"bits": 4, "group_size": 64}
    kept = small.resolve({**small.LLAMA, "quantization": ours, "quantization_config": ours})
    assert kept.config["quantization"] == ours
    assert kept.notes == ()


def test_a_folder_without_weights_says_that_its_weights_are_random(tmp_path):
    """A folder with a config alone gives random weights and says so."""
    written(tmp_path, json.dumps(small.LLAMA))
    source = sources.resolve(str(tmp_path))
    assert source.folder is None
    assert source.label == tmp_path.name
    assert any("random weights" in note for note in source.notes)


def test_an_index_without_its_shards_is_refused(tmp_path):
    """A checkpoint of which only the index has arrived is torn: random weights would pass for the real ones."""
    written(tmp_path, json.dumps(small.LLAMA))
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(lambda: load.lazy(sources.resolve(str(tmp_path))), "safetensors")


def test_the_default_dtype_on_a_cpu_is_float32(monkeypatch, tmp_path):
    """On a CPU float32, whatever the release says; on a GPU the release's dtype."""
    path = written(tmp_path, json.dumps({**small.LLAMA, "torch_dtype": "float16"}))
    monkeypatch.setattr(sources.mx, "default_device", lambda: mx.Device(mx.cpu))
    assert sources.resolve(path).dtype == "float32"
    monkeypatch.setattr(sources.mx, "default_device", lambda: mx.Device(mx.gpu))
    assert sources.resolve(path).dtype == "float16"
    assert sources.resolve(path, dtype="bfloat16").dtype == "bfloat16"


def test_a_source_survives_json():
    """A source that goes through a job file and back is the same."""
    source = small.published("DeepSeek-V4-Flash", layers=6, quantize="mxfp4", sets=["vocab_size=512"], seed=7)
    assert Source.from_json(json.loads(json.dumps(source.to_json()))) == source
    plain = small.resolve(small.LLAMA)
    assert Source.from_json(json.loads(json.dumps(plain.to_json()))) == plain


def test_a_repo_that_can_not_be_fetched_is_refused(monkeypatch):
    """A repo id for which the hub has no answer is refused in one line that names it."""
    import huggingface_hub

    def unreachable(*_, **__):
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    refused(lambda: sources.resolve("org/model"), "'org/model'", "OSError", "no route")


def test_a_repo_is_read_like_a_folder(monkeypatch, tmp_path):
    """A repo id becomes the folder that the hub's cache has; the label is the repo's name."""
    import huggingface_hub

    written(tmp_path, json.dumps(small.LLAMA))
    asked = []

    def snapshot(repo, **options):
        asked.append((repo, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    source = sources.resolve("org/model", fetch_weights=False)
    assert source.config == small.LLAMA
    assert asked[0][0] == "org/model"
    assert "*.safetensors" not in asked[0][1]["allow_patterns"]
