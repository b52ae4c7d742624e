"""A model whole or as one rank's share, from a checkpoint or from random weights, layer by layer.

Everything stays unevaluated until `settle` evaluates it one layer at a time. A whole array lives only while
its layer is evaluated, so the peak is one rank's share plus one layer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from sharding import models, weights
from sharding.errors import BadRequest
from sharding.families.registry import family_of
from sharding.source import DTYPES, QUANTISATIONS, Source
from sharding.tree import WRAPPER, at, parameters_of, renumber, stages

Progress = Callable[[], None]


def lazy(source: Source, *, values: bool = True) -> nn.Module:
    """The whole model, unevaluated.

    Args:
        source: What to build.
        values: Whether weights matter; without them only shapes and dtypes do (for plans). Of a checkpoint
            then just the names of its tensors are read.

    Raises:
        BadRequest: The checkpoint does not fit its config.
    """
    model = models.build(source.config)
    if source.folder is not None and values:
        _load_checkpoint(model, source)
        weights.cast(model, DTYPES[source.dtype])
    else:
        if values:
            family = family_of(source.model_type)
            weights.randomize(model, source.seed, family.integers if family else {})
        weights.cast(model, DTYPES[source.dtype])
        if settings := source.config.get("quantization"):
            quantize(model, settings, None if source.folder is None else _names(source))
    if source.quantize:
        quantize(model, QUANTISATIONS[source.quantize])
    model.eval()
    return model


def quantize(model: nn.Module, settings: dict[str, Any], present: Collection[str] | None = None) -> None:
    """Quantise in place as mlx-lm reads `config["quantization"]`: defaults, and overrides by module path.

    Args:
        model: Float model.
        settings: `group_size`, `bits`, `mode`, and per-module dictionaries or False.
        present: Parameter paths of a checkpoint; a module is quantised where it has `scales` there.
    """
    settings = {key.removeprefix(WRAPPER): value for key, value in settings.items()}
    group_size = settings["group_size"]

    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        if path in settings:
            return settings[path]
        if present is not None:
            return f"{path}.scales" in present
        return bool(module["weight"].shape[-1] % group_size == 0)

    try:
        nn.quantize(
            model,
            group_size=group_size,
            bits=settings["bits"],
            mode=settings.get("mode", "affine"),
            class_predicate=choose,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"quantization {settings}: the model can't be quantised so ({error})") from error


@functools.lru_cache(maxsize=4)
def _names_in(folder: str, kept: tuple[int, ...] | None, config: str) -> frozenset[str]:
    """Names of a checkpoint's tensors as the model calls them; its headers are read once."""
    model = models.build(json.loads(config))
    return frozenset(_tensors(model, Path(folder), kept))


def _names(source: Source) -> frozenset[str]:
    return _names_in(source.folder or "", source.kept, json.dumps(source.config, sort_keys=True))


def read_tensors(folder: Path) -> dict[str, mx.array]:
    """All tensors of a checkpoint folder, unevaluated: the shards its index names, or every safetensors file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted({str(name) for name in weight_map.values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRequest(
                f"{index}: not an index of shards ({error}); fetch the checkpoint again"
            ) from None
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    tensors: dict[str, mx.array] = {}
    for name in names:
        try:
            tensors.update(cast("dict[str, mx.array]", mx.load(str(folder / name))))
        except (RuntimeError, OSError, ValueError) as error:
            raise BadRequest(
                f"{folder / name}: can't be read ({error}); fetch the checkpoint again"
            ) from None
    return tensors


def _tensors(model: nn.Module, folder: Path, kept: tuple[int, ...] | None) -> dict[str, mx.array]:
    """A checkpoint's tensors, unevaluated, under the model's names."""
    tensors = {name.removeprefix(WRAPPER): value for name, value in read_tensors(folder).items()}
    if kept is not None:
        tensors = renumber(tensors, kept)
    if not hasattr(model, "sanitize"):
        return tensors
    try:
        return cast("dict[str, mx.array]", model.sanitize(tensors))
    except Exception as error:  # The model's own code; it takes for granted that nothing is missing.
        raise BadRequest(
            f"{folder}: {type(model).__name__} can't take these tensors ({type(error).__name__}: {error}); "
            "is the checkpoint complete?"
        ) from error


def _load_checkpoint(model: nn.Module, source: Source) -> None:
    folder = Path(source.folder or "")
    tensors = _tensors(model, folder, source.kept)
    if settings := source.config.get("quantization"):
        quantize(model, settings, present=set(tensors))
    arrays = parameters_of(model)
    expected = {path: tuple(value.shape) for path, value in arrays.items()}
    missing = sorted(set(expected) - set(tensors))
    extra = sorted(set(tensors) - set(expected))
    shapes = [p for p in expected if p in tensors and tuple(tensors[p].shape) != expected[p]]
    kinds = [
        path
        for path, value in arrays.items()
        if path in tensors
        and mx.issubdtype(tensors[path].dtype, mx.floating) != mx.issubdtype(value.dtype, mx.floating)
    ]
    found = (
        (missing, "lacks"),
        (extra, "has unknown"),
        (shapes, "has wrongly shaped"),
        (kinds, "has, of the wrong kind of numbers,"),
    )
    for names, what in found:
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise BadRequest(
                f"{folder}: the checkpoint {what} {names[0]}{more}; its config.json does not describe these weights"
            )
    model.load_weights(list(tensors.items()))


def settle(model: nn.Module, progress: Progress = lambda: None) -> None:
    """Evaluate the model one layer at a time, freeing what each layer was made from.

    Args:
        model: As `lazy` makes it.
        progress: Called after each layer.
    """
    for paths in stages(model):
        mx.eval([at(model, path) for path in paths])
        mx.clear_cache()
        progress()
