"""Checkpoints written by hand, in the form in which mlx-community publishes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from sharding import load
from sharding import source as sources
from sharding.tree import parameters_of
from tests.sharding import small


def tensors(
    config: dict[str, Any], quantization: dict[str, Any] | None = None, seed: int = 1
) -> dict[str, mx.array]:
    """The parameters of a model with random weights, by name."""
    model = load.lazy(small.resolve(config, seed=seed))
    if quantization:
        load.quantize(model, quantization)
    load.settle(model)
    return parameters_of(model)


def write(
    folder: Path,
    config: dict[str, Any],
    arrays: Mapping[str, mx.array],
    shards: int = 3,
    index: bool = True,
    prefix: str = "",
) -> Path:
    """Write a checkpoint by hand: safetensors shards, their index and a config."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(arrays)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        own = names[number::shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {prefix + name: arrays[name] for name in own}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(part, file)
    if index:
        total = sum(array.nbytes for array in arrays.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


def loaded(folder: Path, **options: Any) -> dict[str, mx.array]:
    """The parameters of the model of a checkpoint folder, evaluated."""
    return parameters_of(small.whole(sources.resolve(str(folder), dtype="float32", **options)))


def equal(ours: Mapping[str, mx.array], theirs: Mapping[str, mx.array]) -> bool:
    """Whether two models have the same parameters, bit for bit."""
    return ours.keys() == theirs.keys() and all(
        ours[p].dtype == theirs[p].dtype and bool(mx.array_equal(ours[p], theirs[p]).item()) for p in ours
    )
