"""Parameters and modules of a model by dotted path, and the order in which a model loads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

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
