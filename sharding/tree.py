"""Parameters and modules of a model by dotted path, and the order in which a model loads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

T = TypeVar("T")
LAYER = re.compile(r"(?P<head>(?:^|\.)layers\.)(?P<number>\d+)(?=\.)")
"""A decoder layer's number inside a parameter's path."""


def parameters_of(model: nn.Module) -> dict[str, mx.array]:
    """Every parameter by its dotted path."""
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())))


def at(model: nn.Module, path: str) -> Any:
    """The array or module at a dotted path; the empty path is the model."""
    current: Any = model
    for name in path.split(".") if path else ():
        current = current[int(name)] if isinstance(current, list) else current[name]
    return current


def assign(model: nn.Module, path: str, value: Any) -> None:
    """Put an array or a module at a dotted path."""
    parent, _, last = path.rpartition(".")
    at(model, parent)[last] = value


WRAPPER = "language_model."
"""What a vision model's wrapper puts before the names of its language model's modules."""


def renumber(entries: Mapping[str, T], kept: Sequence[int]) -> dict[str, T]:
    """Keep the entries about the layers `kept`, under their new numbers, and all that are about no layer.

    Args:
        entries: Keyed by paths of parameters or modules; of other keys nothing is changed.
        kept: Original numbers in the new order.
    """
    new = {old: number for number, old in enumerate(kept)}
    result = {}
    for path, value in entries.items():
        match = LAYER.search(path)
        if match is None:
            result[path] = value
        elif int(match["number"]) in new:
            result[
                f"{path[: match.start()]}{match['head']}{new[int(match['number'])]}{path[match.end() :]}"
            ] = value
    return result


def clone(model: nn.Module) -> nn.Module:
    """A copy of the module tree that shares its arrays: much cheaper than building the model again."""
    copies: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, nn.Module):
            if id(value) not in copies:
                new = copies[id(value)] = type(value).__new__(type(value))
                new.__dict__.update(value.__dict__)
                dict.update(new, {name: copy(child) for name, child in value.items()})
            return copies[id(value)]
        if isinstance(value, dict):
            return {name: copy(child) for name, child in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(copy(child) for child in value)
        return value

    result: nn.Module = copy(model)
    return result


def stages(model: nn.Module) -> Iterator[list[str]]:
    """Parameter paths in the order of loading: one list per decoder layer, then all the rest."""
    rest = []
    layers: dict[str, list[str]] = {}
    for path in parameters_of(model):
        match = LAYER.search(path)
        if match is None:
            rest.append(path)
        else:
            layers.setdefault(path[: match.end()], []).append(path)
    yield from layers.values()
    yield rest
