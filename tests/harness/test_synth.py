"""`synth` writes a whole checkpoint as it is published, or nothing at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from harness.request import ModelRequest
from sharding import load, synth
from sharding.errors import BadRequest
from sharding.source import Source
from sharding.tree import parameters_of
from tests.harness.shell import DATA, LLAMA, V4_SETS


def small(folder: Path, **changes: Any) -> Source:
    """A small llama with random weights."""
    folder.mkdir(exist_ok=True)
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    return ModelRequest(source=str(folder / "llama.json"), dtype="float32", **changes).resolve()


def parameters(source: Source) -> dict[str, mx.array]:
    """All of a model's, evaluated."""
    model = load.lazy(source)
    load.settle(model)
    return parameters_of(model)


def tensors_in(path: Path) -> dict[str, mx.array]:
    """What one safetensors file holds."""
    held: Any = mx.load(str(path))
    return dict(held)


def same(first: Source, second: Source) -> bool:
    """Bit for bit."""
    ours, theirs = parameters(first), parameters(second)
    return ours.keys() == theirs.keys() and all(
        ours[path].dtype == theirs[path].dtype and bool(mx.array_equal(ours[path], theirs[path]).item())
        for path in ours
    )


@pytest.mark.parametrize("quantize", [None, "4bit", "mxfp8"])
def test_what_is_written_is_the_model(tmp_path: Path, quantize: str | None) -> None:
    """Loading the folder gives the very weights that the config and the seed give without it."""
    source = small(tmp_path, quantize=quantize, seed=5)
    synth.write(source, tmp_path / "out")
    written = ModelRequest(source=str(tmp_path / "out"), dtype="float32").resolve()
    assert written.folder is not None
    assert written.quantization == quantize
    assert same(source, written)


def test_shards_have_an_index_that_names_every_tensor(tmp_path: Path) -> None:
    """Small shards: more than one file, numbered as published ones are, each tensor in the file that is named."""
    source = small(tmp_path)
    files = synth.write(source, tmp_path / "out", shard_bytes=100_000)
    shards = [path for path in files if path.suffix == ".safetensors"]
    assert len(shards) > 2
    assert [path.name for path in shards] == [
        f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held = {name: path.name for path in shards for name in tensors_in(path)}
    assert index["weight_map"] == held
    assert set(held) == set(parameters(source))
    total = sum(array.nbytes for array in parameters(source).values())
    assert index["metadata"]["total_size"] == total
    assert same(source, ModelRequest(source=str(tmp_path / "out"), dtype="float32").resolve())


def test_the_config_says_what_was_made(tmp_path: Path) -> None:
    """Quantisation as mlx-community writes it; seed and cuts beside it."""
    source = small(tmp_path, quantize="4bit", layers=1, seed=9)
    synth.write(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    assert config["num_hidden_layers"] == 1
    assert config["shardbench"]["seed"] == 9
    assert config["shardbench"]["random_weights"] is True
    assert any("num_hidden_layers" in cut for cut in config["shardbench"]["cuts"])


@pytest.mark.parametrize("quantize", [None, "4bit"])
def test_v4_survives_its_own_sanitize(tmp_path: Path, quantize: str | None) -> None:
    """The hardest family: what is written loads through the model's own renaming, bit for bit."""
    config = str(DATA / "DeepSeek-V4-Flash.json")
    source = ModelRequest(
        source=config, layers=4, set=dict(V4_SETS), quantize=quantize, dtype="float32"
    ).resolve()
    synth.write(source, tmp_path / "out")
    assert same(source, ModelRequest(source=str(tmp_path / "out"), dtype="float32").resolve())


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    """Whatever is there: refused, and not a byte of it changes."""
    source = small(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(BadRequest, match="exists"):
        synth.write(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A full disk or Ctrl-C in the middle: no folder, also no hidden one."""
    source = small(tmp_path)
    calls: list[str] = []
    save = mx.save_safetensors

    def fails(path: str, *args: Any, **kwargs: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise error
        save(path, *args, **kwargs)

    monkeypatch.setattr(mx, "save_safetensors", fails)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else BadRequest):
        synth.write(source, tmp_path / "below" / "out", shard_bytes=100_000)
    assert len(calls) == 2
    assert list((tmp_path / "below").iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A file where a folder should be: one line, nothing made."""
    source = small(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadRequest, match="can't be written"):
        synth.write(source, tmp_path / "file" / "out")
