"""Taps on the blocks of a model: see, force or disturb what goes in and out of attention and feed-forward blocks.

    recorder = Recorder()
    with tapped(model, recorder):
        recorder.begin(0)
        model(tokens, cache=cache)
    recorder.records                      # (call, block, occurrence) -> input and output

A block is a direct child of an element of `model.layers` that holds linear maps (parameters called `weight` with two
or more dimensions, its own or its children's) and is called. Norms hold vectors; DeepSeek V4's hyper-connections hold
a matrix, but no linear map, and call the block they wrap: neither is one. So no model family is named here, and the
taps work on anyone's sharded model as long as the block is still found under the same name.

A tap is a subclass made for one object (`module.__class__` is swapped): instance checks, parameters and the module's
own methods are untouched, and the class is put back at the end whatever happens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from harness.distance import Distance, distance, row_distances

FLOAT_BYTES_LIMIT = 1 << 30
"""Bytes of block records that a recorder keeps at most, unless told otherwise."""


@dataclass(frozen=True, order=True)
class Block:
    """Where a block is: the layer's number in the whole model, and its name in the layer (`self_attn`, `ffn`)."""

    layer: int
    module: str

    def __str__(self) -> str:
        return f"layers.{self.layer}.{self.module}"


@dataclass(frozen=True, order=True)
class Visit:
    """One call of one block: the n-th forward pass of the model, the block, the n-th time in that pass."""

    call: int
    block: Block
    occurrence: int


@dataclass(frozen=True)
class Record:
    """What a block was given and what it returned in one visit; `order` counts visits in the order of execution."""

    order: int
    x: mx.array
    y: mx.array


class Handler(Protocol):
    """What happens in a tap: gets the block, the untapped block as a function of its input, and that input."""

    def begin(self, call: int) -> None:
        """The model's `call`-th forward pass since its cache was empty starts."""

    def __call__(self, block: Block, forward: Callable[[mx.array], Any], x: mx.array) -> Any: ...


class RecordsTooLargeError(ValueError):
    """The records of a prompt need more memory than allowed."""


def layers_of(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """The layers that this process holds, with their numbers in the whole model.

    Under pipelining a process holds some only: mlx-lm and mlx-vlm then put None in place of the layers of later
    ranks, or hide those from `model.layers` and keep the number of the first in `start_idx`.

    Raises:
        ValueError: the model shows no layers.
    """
    for owner in (model, getattr(model, "model", None), getattr(model, "language_model", None)):
        layers = getattr(owner, "layers", None)
        if not isinstance(layers, list | tuple) or not layers:
            continue
        first = 0
        if not any(layer is None for layer in layers):
            for inner in (owner, getattr(owner, "model", None)):
                if len(getattr(inner, "pipeline_layers", ())) == len(layers):
                    first = int(getattr(inner, "start_idx", 0))
        return [(first + i, layer) for i, layer in enumerate(layers) if isinstance(layer, nn.Module)]
    raise ValueError(f"{type(model).__name__} has no `layers`: its blocks can't be compared one by one")


def find_blocks(model: nn.Module) -> dict[Block, nn.Module]:
    """The candidates for blocks, in the order of layers; those that are never called take part in nothing."""
    found: dict[Block, nn.Module] = {}
    seen: set[int] = set()
    for number, layer in layers_of(model):
        for path, module in _flat(layer.children(), nn.Module.is_module):
            if isinstance(module, nn.Module) and id(module) not in seen and any(_linear_maps(module)):
                seen.add(id(module))
                found[Block(number, path)] = module
    return found


def _flat(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    flat: Any = tree_flatten(tree, is_leaf=is_leaf)
    return [(str(path), leaf) for path, leaf in flat]


def _linear_maps(module: nn.Module) -> Iterator[tuple[nn.Module, mx.array]]:
    for _, part in module.named_modules():
        weight = part.get("weight")
        if isinstance(weight, mx.array) and weight.ndim >= 2:
            yield part, weight


def widest_reduction(module: nn.Module) -> int:
    """The most terms that any linear map of a block adds up: its rounding error grows with the root of that."""
    widest = 1
    for part, weight in _linear_maps(module):
        # A quantised weight is packed into words of 32 bits.
        packed = 32 // int(getattr(part, "bits", 4)) if weight.dtype == mx.uint32 else 1
        widest = max(widest, weight.shape[-1] * packed)
    return widest


@contextmanager
def tapped(model: nn.Module, handler: Handler) -> Iterator[tuple[Block, ...]]:
    """Route every call of the model's blocks through `handler` for as long as the context lasts.

    Raises:
        RuntimeError: the model is tapped already.
    """
    blocks = find_blocks(model)
    originals: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for block, module in blocks.items():
            cls = type(module)
            if getattr(cls, "_shardbench_tap", False):
                raise RuntimeError(f"{block} is tapped already")
            originals.append((module, cls))
            object.__setattr__(module, "__class__", _tapped_class(cls, block, handler))
        yield tuple(blocks)
    finally:
        for module, cls in originals:
            object.__setattr__(module, "__class__", cls)


def _tapped_class(cls: type[nn.Module], block: Block, handler: Handler) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], mx.array):
            return handler(block, lambda x: cls.__call__(self, x, *args[1:], **kwargs), args[0])
        for name, value in kwargs.items():
            if isinstance(value, mx.array):
                with_input = functools.partial(_call_with, cls, self, name, args, kwargs)
                return handler(block, with_input, value)
        raise TypeError(f"{block} was called without an array to compute on")

    # The name stays: some code looks classes up by it.
    body = {
        "__call__": call,
        "_shardbench_tap": True,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return type(cls.__name__, (cls,), body)


def _call_with(
    cls: type[nn.Module],
    module: nn.Module,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    x: mx.array,
) -> Any:
    return cls.__call__(module, *args, **{**kwargs, name: x})


def first_array(output: Any) -> mx.array:
    """A block's result: its output, or the first array of it where it returns several (say with keys and values)."""
    for _, leaf in _flat(output):
        if isinstance(leaf, mx.array):
            return leaf
    raise TypeError(f"a block returned {type(output).__name__}, which holds no array")


def with_first_array(output: Any, value: mx.array) -> Any:
    """The same output with its first array replaced, and all else, which may differ per rank, kept."""
    if isinstance(output, mx.array):
        return value
    if not isinstance(output, list | tuple):
        raise TypeError(
            f"a block returned {type(output).__name__}; only arrays, tuples and lists can be forced"
        )
    items = list(output)
    for i, item in enumerate(items):
        if isinstance(item, mx.array | list | tuple):
            items[i] = with_first_array(item, value)
            break
    return type(output)(items) if type(output) in (list, tuple) else type(output)(*items)


class _Visits:
    """Counts visits: which pass of the model it is, and how often each block was called in it."""

    def __init__(self) -> None:
        self.call = 0
        self._occurrences: dict[Block, int] = {}

    def begin(self, call: int) -> None:
        """A forward pass of the model starts, the `call`-th since its cache was empty."""
        self.call = call
        self._occurrences = {}

    def visit(self, block: Block) -> Visit:
        occurrence = self._occurrences.get(block, 0)
        self._occurrences[block] = occurrence + 1
        return Visit(self.call, block, occurrence)


class Recorder(_Visits):
    """Keeps each visit's input and output, evaluated, up to a limit of bytes.

    A pass that doesn't fit any more is left out whole, with all that follow (`complete` is then False): a cache that
    was filled by free-running passes in between would carry a difference from one pass into the next.

    Raises:
        RecordsTooLargeError: not even the first pass, the prompt's, fits.
    """

    def __init__(self, max_bytes: int = FLOAT_BYTES_LIMIT) -> None:
        super().__init__()
        self.records: dict[Visit, Record] = {}
        self.complete = True
        self._max_bytes = max_bytes
        self._bytes = 0

    def __call__(self, block: Block, forward: Callable[[mx.array], Any], x: mx.array) -> Any:
        visit = self.visit(block)
        output = forward(x)
        y = first_array(output)
        if not self.complete:
            return output
        mx.eval(x, y)
        self._bytes += x.nbytes + y.nbytes
        if self._bytes > self._max_bytes:
            if self.call == 0:
                raise RecordsTooLargeError(
                    f"the inputs and outputs of the blocks for a prompt of shape {x.shape[:-1]} need more than "
                    f"{self._max_bytes >> 20} MiB: verify with fewer prompt tokens, a smaller batch or fewer layers"
                )
            self.complete = False
            self.records = {v: r for v, r in self.records.items() if v.call < self.call}
            return output
        self.records[visit] = Record(len(self.records), x, y)
        return output


@dataclass(frozen=True)
class BlockDistance:
    """How far a block's input (what came before it) or output (the block itself) was from the reference's.

    Attributes:
        rows: of an output each row's distance, as `row_distances` gives it, where that was asked for.
    """

    visit: Visit
    order: int
    what: str
    distance: Distance
    rows: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if self.what not in ("input", "output"):
            raise ValueError(f"a block has an input and an output, no {self.what!r}")


class Forcer(_Visits):
    """Gives each block the reference's input, compares what it returns, and passes on the reference's output.

    So no block sees another's difference: one pass finds every block that is wrong, and none that isn't. What arrives
    at a block, a function of the outputs passed on, is compared before it is replaced: that covers what stands between
    blocks (norms, residual sums, the embedding). A visit that the reference has no record of runs freely.

    Args:
        records: the reference's.
        watch: blocks of whose outputs each row's distance is kept.
        jitter: for measuring noise on the reference itself: a function that disturbs what is passed in and on.
    """

    def __init__(
        self,
        records: Mapping[Visit, Record],
        watch: Container[Block] = (),
        jitter: Callable[[mx.array], mx.array] | None = None,
    ) -> None:
        super().__init__()
        self.distances: list[BlockDistance] = []
        self.unlike: dict[Block, str] = {}
        self._records = records
        self._watch = watch
        self._jitter = jitter or (lambda x: x)

    def __call__(self, block: Block, forward: Callable[[mx.array], Any], x: mx.array) -> Any:
        visit = self.visit(block)
        record = self._records.get(visit)
        if record is None:
            return forward(x)
        if x.shape != record.x.shape:
            # Not an error yet: a strategy may cut the batch or the tokens. Then only the end can be compared.
            self.unlike.setdefault(
                block, f"gets {tuple(x.shape)}, in the whole model {tuple(record.x.shape)}"
            )
            return forward(x)
        self._see(visit, record, "input", x)
        output = forward(self._jitter(record.x).astype(x.dtype))
        y = first_array(output)
        # Evaluated here, block by block: with the output replaced nothing else would ask for it, and ranks that
        # evaluate in one fixed order can't meet in different collectives.
        mx.eval(y)
        self._see(visit, record, "output", y)
        return with_first_array(output, self._jitter(record.y).astype(y.dtype))

    def _see(self, visit: Visit, record: Record, what: str, value: mx.array) -> None:
        reference = record.x if what == "input" else record.y
        far = distance(value, reference)
        watched = what == "output" and far.problem is None and visit.block in self._watch
        rows = row_distances(value, reference) if watched else None
        self.distances.append(BlockDistance(visit, record.order, what, far, rows))


class Disturber(_Visits):
    """Lets the model run freely, with every block's output disturbed: how far does it move the end?"""

    def __init__(self, jitter: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self._jitter = jitter

    def __call__(self, block: Block, forward: Callable[[mx.array], Any], x: mx.array) -> Any:
        output = forward(x)
        return with_first_array(output, self._jitter(first_array(output)))


class Rounding:
    """Moves every element of an array by `ulps` roundings of its type, up or down at random (seeded).

    Negative `ulps` move each the other way than positive ones from the same seed.
    """

    def __init__(self, seed: int, ulps: int = 1) -> None:
        if ulps == 0:
            raise ValueError("a disturbance of no ulps moves nothing")
        self._key = mx.random.key(seed)
        self._ulps = ulps

    def __call__(self, x: mx.array) -> mx.array:
        self._key, key = mx.random.split(self._key)
        up = mx.random.bernoulli(0.5, x.shape, key=key)
        step = self._ulps * mx.finfo(x.dtype).eps
        return mx.where(up, x * (1 + step), x * (1 - step)).astype(x.dtype)
