"""What code asks of `mx.distributed`: recorded on real ranks, or traced with no weights and no ranks.

A trace runs one lazy decode step of a lazily built, split model with a stand-in group. Every collective
answers with an array of the right shape, so that the sequence, the shapes and the dtypes are the real ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sharding.forward import make_cache

KINDS = ("all_sum", "all_gather", "all_max", "all_min", "sum_scatter", "send", "recv", "recv_like")
"""The operations of `mx.distributed` that move data."""


@dataclass(frozen=True)
class Call:
    """One call of a collective by one rank.

    Attributes:
        kind: Name in `mx.distributed`.
        shape: Shape of what this rank hands in (of what it receives, for recv).
        dtype: Name of its dtype, as in "float32".
        nbytes: Its size in bytes.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass
class Recording:
    """The calls recorded so far, in order."""

    calls: list[Call] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Number of calls by kind."""
        return dict(Counter(call.kind for call in self.calls))

    def payload(self) -> int:
        """Bytes handed in by this rank, over all calls."""
        return sum(call.nbytes for call in self.calls)


class StandInGroup:
    """A group object for code that asks only for its rank and size."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        """This rank's number."""
        return self._rank

    def size(self) -> int:
        """World size."""
        return self._ranks


def _note(recording: Recording, kind: str, array: mx.array) -> None:
    name = str(array.dtype).removeprefix("mlx.core.")
    recording.calls.append(Call(kind, tuple(array.shape), name, array.nbytes))


@contextmanager
def replaced(functions: dict[str, Callable[..., Any]], holder: Any = mx.distributed) -> Iterator[None]:
    """Replace functions of a module (by default `mx.distributed`) for the duration of a block."""
    saved = {name: getattr(holder, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(holder, name, function)
        yield
    finally:
        for name, function in saved.items():
            setattr(holder, name, function)


@contextmanager
def counting() -> Iterator[Recording]:
    """Record the collectives of real ranks; each call still does its work.

    Graphs that `mx.compile` has cached hide their collectives: disable compilation for a count.
    """
    recording = Recording()

    def recorded(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            handed_in = args[0] if args and isinstance(args[0], mx.array) else kwargs.get("x")
            _note(recording, kind, handed_in if isinstance(handed_in, mx.array) else result)
            return result

        return call

    with replaced({kind: recorded(kind, getattr(mx.distributed, kind)) for kind in KINDS}):
        yield recording


@contextmanager
def tracing(group: StandInGroup) -> Iterator[Recording]:
    """Record collectives without ranks: each answers lazily with an array of the right shape.

    Evaluation is switched off meanwhile, so that code which evaluates on the way allocates nothing.
    """
    recording = Recording()
    n = group.size()

    def same(kind: str) -> Callable[..., mx.array]:
        def call(x: mx.array, *_: Any, **__: Any) -> mx.array:
            _note(recording, kind, x)
            return x

        return call

    def all_gather(x: mx.array, *_: Any, **__: Any) -> mx.array:
        _note(recording, "all_gather", x)
        return mx.concatenate([x if x.ndim else x[None]] * n, axis=0)

    def sum_scatter(x: mx.array, *_: Any, **__: Any) -> mx.array:
        _note(recording, "sum_scatter", x)
        return x[: x.shape[0] // n]

    def recv(shape: Any, dtype: mx.Dtype, *_: Any, **__: Any) -> mx.array:
        x = mx.zeros(shape, dtype)
        _note(recording, "recv", x)
        return x

    stand_ins: dict[str, Callable[..., Any]] = {
        kind: same(kind) for kind in ("all_sum", "all_max", "all_min", "send", "recv_like")
    }
    stand_ins |= {
        "all_gather": all_gather,
        "sum_scatter": sum_scatter,
        "recv": recv,
        "init": lambda *_, **__: group,
    }

    def nothing(*_: Any, **__: Any) -> None:
        return None

    mx.disable_compile()
    try:
        with replaced(stand_ins), replaced({"eval": nothing, "async_eval": nothing}, mx):
            yield recording
    finally:
        mx.enable_compile()


def arrays_in(holder: Any) -> list[mx.array]:
    """All arrays that an object holds, in lists and attributes below it too, in a fixed order."""
    if isinstance(holder, mx.array):
        return [holder]
    if isinstance(holder, dict):
        holder = list(holder.values())
    elif not isinstance(holder, (list, tuple)):
        holder = list(vars(holder).values()) if hasattr(holder, "__dict__") else []
    return [array for value in holder for array in arrays_in(value)]


@dataclass(frozen=True)
class StepTrace:
    """One lazy decode step into an empty cache.

    Attributes:
        calls: Each collective, in order.
        cache: Shape of each array of the cache after the step.
    """

    calls: tuple[Call, ...]
    cache: tuple[tuple[int, ...], ...]

    def counts(self) -> dict[str, int]:
        """Collectives of the step, by kind."""
        return Recording(list(self.calls)).counts()

    def payload(self) -> int:
        """Bytes that this rank hands in during the step."""
        return Recording(list(self.calls)).payload()


def trace_step(model: nn.Module, recording: Recording, batch: int) -> StepTrace:
    """Decode one token lazily, inside `tracing`; what it asks for does not depend on the depth of the cache.

    Args:
        model: A split model, unevaluated.
        recording: What `tracing` yielded.
        batch: Sequences at once.
    """
    cache = make_cache(model)
    before = len(recording.calls)
    model(mx.zeros((batch, 1), mx.int32), cache=cache)
    return StepTrace(tuple(recording.calls[before:]), tuple(tuple(a.shape) for a in arrays_in(cache)))


def cache_arrays(model: nn.Module, batch: int, context: int) -> list[mx.array]:
    """The arrays of the cache, unevaluated, after `context` tokens and one decode step, inside `tracing`."""
    cache = make_cache(model)
    if context:
        model(mx.zeros((batch, context), mx.int32), cache=cache)
    model(mx.zeros((batch, 1), mx.int32), cache=cache)
    return arrays_in(cache)
