"""Random weights: random everywhere, seeded, the same on every rank and never shipped.

Zeros hide faults (a sink of zero may be sliced in any way), so no parameter keeps its initial value: norms,
biases, sinks, gates and router corrections are random too. Each array depends on the seed and its own path
alone, so that a rank can make the arrays of one layer, keep its share and free the rest. Values are uniform,
scaled so that activations keep unit spread; a uniform draw costs a quarter of a normal one on a CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from sharding.errors import BadRequest
from sharding.tree import parameters_of

SPREAD = 0.3
"""Standard deviation of what is neither a matrix nor a norm: biases, sinks, corrections."""


def key_of(seed: int, path: str) -> mx.array:
    """The random key of one array."""
    digest = hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest()
    return mx.random.key(int.from_bytes(digest, "little"))


def _uniform(shape: tuple[int, ...], deviation: float, key: mx.array) -> mx.array:
    bound = deviation * 3**0.5
    return mx.random.uniform(-bound, bound, shape, key=key)


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, mx.array]]:
    """(path, owning module, own name, array) of every parameter."""
    for path, module in model.named_modules():
        for name, value in module.items():
            if isinstance(value, mx.array) and not name.startswith("_"):
                yield (f"{path}.{name}" if path else name), module, name, value


def _value(
    path: str, module: nn.Module, name: str, old: mx.array, key: mx.array, integers: Mapping[str, str]
) -> mx.array:
    shape = tuple(old.shape)
    if not mx.issubdtype(old.dtype, mx.floating):
        if name not in integers:
            raise BadRequest(
                f"{path}: integer parameter of {type(module).__name__} with unknown range; no random value"
            )
        return _distinct(shape, int(getattr(module, integers[name])), key).astype(old.dtype)
    is_scale = "Norm" in type(module).__name__ and name == "weight"
    if is_scale or (name == "scale" and old.ndim <= 1):
        return 1 + _uniform(shape, SPREAD / 2, key)
    if old.ndim >= 2 and name in ("weight", "fn"):
        return _uniform(shape, shape[-1] ** -0.5, key)
    return _uniform(shape, SPREAD, key)


def _distinct(shape: tuple[int, ...], bound: int, key: mx.array) -> mx.array:
    """Integers below `bound`, distinct within a row (a token is routed to k different experts)."""
    rows, columns = shape
    first, step = mx.random.split(key)
    start = mx.random.randint(0, bound, (rows, 1), key=first)
    stride = mx.random.randint(1, max(2, bound // columns), (rows, 1), key=step)
    return (start + stride * mx.arange(columns)) % bound


def randomize(model: nn.Module, seed: int, integers: Mapping[str, str] | None = None) -> None:
    """Give every parameter of a float model its random value, unevaluated.

    Args:
        model: The whole, unsharded, unquantised model.
        seed: Same seed, same weights, on every rank.
        integers: Integer parameters by name, to the attribute that bounds their values (exclusive).
    """
    values = [
        (path, _value(path, module, name, old, key_of(seed, path), integers or {}).astype(old.dtype))
        for path, module, name, old in _owners(model)
    ]
    model.update(tree_unflatten(values))


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast floating parameters to `dtype`, but for those that the model keeps in float32 (`cast_predicate`)."""
    keep = getattr(model, "cast_predicate", None) or (lambda _: True)
    changed = [
        (path, value.astype(dtype))
        for path, value in parameters_of(model).items()
        if value.dtype != dtype and mx.issubdtype(value.dtype, mx.floating) and keep(path)
    ]
    if changed:
        model.update(tree_unflatten(changed))
