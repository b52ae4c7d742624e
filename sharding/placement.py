"""The vocabulary of placements: which part of a parameter each rank keeps, and who adds partial sums up.

A `Cut` is arithmetic on one axis of one array. A `Placement` is what a family's table says of a module
("its rows are heads"); it turns the module's real shapes into cuts, or into reasons why there are none.
Axes count from the end, so that one rule serves a linear layer (out, in), stacked experts
(experts, out, in) and grouped projections (groups, out, in).

Wherever a linear layer is quantised, `weight` packs 32 / bits values of one row into a word, and `scales`
and `biases` hold one value per `group_size` inputs: a cut of the output axis is the same for all three, a
cut of the input axis must fall on a border between quantisation groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from sharding.tree import parameters_of

OUT, IN, STACK = -2, -1, -3
QUANTISED = ("weight", "scales", "biases")


@dataclass(frozen=True)
class Cut:
    """One axis of one array, dealt out over the ranks in equal shares.

    Attributes:
        axis: The axis, counted from the end (negative).
        units: The axis consists of this many equal pieces that can't be divided (heads, rows, groups).
        runs: The pieces form this many equal runs, and every rank gets the same contiguous share of
            *every* run. 1 is the usual contiguous split; the number of output groups gives the
            interleaved split that DeepSeek V4's grouped output projection needs.
    """

    axis: int
    units: int
    runs: int = 1

    def __post_init__(self) -> None:
        if self.axis >= 0 or self.units < 1 or self.runs < 1 or self.units % self.runs:
            raise ValueError(f"not a cut: {self}")

    def divides(self, ranks: int) -> bool:
        """Whether `ranks` equal shares exist."""
        return (self.units // self.runs) % ranks == 0

    def spans(self, rank: int, ranks: int, length: int) -> list[tuple[int, int]]:
        """The half-open index ranges of an axis of `length` that `rank` keeps, in order."""
        if not self.divides(ranks) or length % self.units:
            raise ValueError(f"{self} of an axis of {length} has no {ranks} equal shares")
        run = length // self.runs
        share = run // ranks
        return [(r * run + rank * share, r * run + (rank + 1) * share) for r in range(self.runs)]

    def take(self, array: mx.array, rank: int, ranks: int) -> mx.array:
        """`rank`'s share as a contiguous copy, so that the whole array can be freed."""
        axis = array.ndim + self.axis
        parts = []
        for start, stop in self.spans(rank, ranks, array.shape[axis]):
            index: list[Any] = [slice(None)] * array.ndim
            index[axis] = slice(start, stop)
            parts.append(array[tuple(index)])
        return mx.contiguous(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis))

    def join(self, shares: list[mx.array]) -> mx.array:
        """The inverse of `take`: all ranks' shares, in rank order, back to the whole array."""
        axis = shares[0].ndim + self.axis
        if self.runs == 1:
            return mx.concatenate(shares, axis=axis)
        split = [mx.split(share, self.runs, axis=axis) for share in shares]
        return mx.concatenate([pieces[r] for r in range(self.runs) for pieces in split], axis=axis)


@dataclass(frozen=True)
class Once:
    """A bias on a partial sum that the block adds up: rank 0 keeps it, the others add zeros."""

    def take(self, array: mx.array, rank: int, ranks: int) -> mx.array:
        """The array on rank 0, zeros of its shape elsewhere."""
        del ranks
        return mx.contiguous(array) if rank == 0 else mx.zeros_like(array)

    def join(self, shares: list[mx.array]) -> mx.array:
        """Rank 0's share is the whole."""
        return shares[0]


Share = Cut | Once | None
"""How one array is shared out; None means that every rank keeps the whole."""
Cuts = dict[str, Share]
Reduce = Literal["sum_output", "sum_input", "gather_output"]


@dataclass(frozen=True)
class Collective:
    """One collective that a decode step asks for.

    Attributes:
        kind: `all_sum` or `all_gather`, as in `mx.distributed`.
        features: Elements per token that the busiest rank hands in.
        where: Path of the module that asks for it.
    """

    kind: str
    features: int
    where: str


@dataclass(frozen=True)
class Leaf:
    """A module (or a bare array) that one entry of a table places.

    Attributes:
        path: Dotted path from the model.
        module: The module, or the array itself for a bare parameter.
        host: The block that holds it; head counts and the like are its attributes.
    """

    path: str
    module: nn.Module | mx.array
    host: nn.Module

    def arrays(self) -> dict[str, mx.array]:
        """The leaf's arrays by their name below it; a bare array has the empty name."""
        if isinstance(self.module, mx.array):
            return {"": self.module}
        return parameters_of(self.module)

    def size(self, axis: int) -> int:
        """Features of a linear layer along `OUT`, `IN` or `STACK`, unpacked when it is quantised."""
        if isinstance(self.module, mx.array):
            return self.module.shape[axis]
        weight = self.module["weight"]
        if axis == IN and "scales" in self.module:
            return self.module["scales"].shape[-1] * self.module.group_size
        return weight.shape[axis]

    def count(self, attribute: str) -> int:
        """An integer attribute of the host, such as `n_heads`."""
        return int(getattr(self.host, attribute))


@dataclass(frozen=True)
class Placement:
    """What a table says of one leaf. The base class is `replicated`: every rank keeps the whole.

    Attributes:
        reduce: The collectives that are added around the leaf, in the order in which they happen. Empty
            leaves reducing to the block that holds the leaf.
        partial: The leaf's output is a partial sum that the block adds up, so a bias must count once.
    """

    reduce: tuple[Reduce, ...] = ()
    partial: bool = False

    def cuts(self, leaf: Leaf) -> Cuts:
        """How each of the leaf's arrays is shared out: whole, but for a bias that must count once."""
        return {name: Once() if self.partial and name == "bias" else None for name in leaf.arrays()}

    def problems(self, leaf: Leaf, ranks: int) -> list[str]:
        """Why the leaf can't be split over `ranks`; empty when it can."""
        del leaf, ranks
        return []

    def collectives(self, leaf: Leaf, ranks: int) -> list[Collective]:
        """The collectives that `reduce` adds, for one token."""
        found = []
        for step in self.reduce:
            if step == "sum_output":
                found.append(Collective("all_sum", leaf.size(OUT), leaf.path))
            elif step == "sum_input":
                found.append(Collective("all_sum", leaf.size(IN), leaf.path))
            else:
                found.append(Collective("all_gather", leaf.size(OUT) // ranks, leaf.path))
        return found


@dataclass(frozen=True)
class Split(Placement):
    """One axis of a linear layer (or of a bare array) dealt out over the ranks.

    Attributes:
        axis: `OUT` (column parallel), `IN` (row parallel) or `STACK` (whole groups).
        units: Attribute of the host that counts the indivisible pieces; None means single features.
        runs: Attribute of the host that counts the interleaved runs; None means one.
        what: The word for a piece, in reasons.
    """

    axis: int = OUT
    units: str | None = None
    runs: str | None = None
    what: str = "features"

    def _cut(self, leaf: Leaf) -> Cut:
        units = leaf.size(self.axis) if self.units is None else leaf.count(self.units)
        return Cut(self.axis, units, 1 if self.runs is None else leaf.count(self.runs))

    def cuts(self, leaf: Leaf) -> Cuts:
        """The same cut for weight, scales and biases; a bias follows the output axis."""
        if self._unfit(leaf):
            return dict.fromkeys(leaf.arrays())  # claimed, since `problems` names the leaf
        cut = self._cut(leaf)
        if isinstance(leaf.module, mx.array):
            return {"": cut}
        quantised = "scales" in leaf.module
        cuts: Cuts = {}
        for name in leaf.arrays():
            if name in QUANTISED:
                cuts[name] = cut if cut.axis != IN or not quantised else self._grouped(cut, leaf)
            elif name == "bias":
                # A row-parallel bias is added once: by our own layer after its sum, which needs it whole
                # (see collectives), or by rank 0 alone where the block sums.
                after_sum = None if "sum_output" in self.reduce else Once()
                cuts[name] = Cut(-1, cut.units, cut.runs) if self.axis == OUT else after_sum
            # Anything else is no parameter of a linear layer: left unclaimed, so that the plan refuses it by name.
        return cuts

    def _unfit(self, leaf: Leaf) -> str:
        """Why this is no leaf that can be split at all; empty when it is one."""
        if isinstance(leaf.module, nn.Module) and "weight" not in leaf.module:
            return (
                f"{leaf.path}: {type(leaf.module).__name__} is no linear layer, and the table splits one here"
            )
        units = None if self.units is None else leaf.count(self.units)
        runs = 1 if self.runs is None else leaf.count(self.runs)
        if units is not None and (units < 1 or runs < 1 or units % runs):
            return f"{leaf.path}: {units} {self.what} do not fill {runs} equal groups"
        return ""

    @staticmethod
    def _grouped(cut: Cut, leaf: Leaf) -> Cut:
        """A cut of the input axis in units that packed words and scales both have: quantisation groups."""
        groups = leaf.arrays()["scales"].shape[-1]
        return Cut(cut.axis, groups, cut.runs if groups % cut.runs == 0 else 1)

    def problems(self, leaf: Leaf, ranks: int) -> list[str]:
        """Indivisible pieces, and cuts that fall inside a quantisation group."""
        if unfit := self._unfit(leaf):
            return [unfit]
        cut = self._cut(leaf)
        size = leaf.size(self.axis)
        per_run = cut.units // cut.runs
        if size % cut.units:
            return [f"{leaf.path}: {size} features are not {cut.units} equal {self.what}"]
        if not cut.divides(ranks):
            within = f" in each of {cut.runs} groups" if cut.runs > 1 else ""
            return [f"{leaf.path}: {per_run} {self.what}{within} do not divide by {ranks} ranks"]
        if self.axis == IN and isinstance(leaf.module, nn.Module) and "scales" in leaf.module:
            group, share = leaf.module.group_size, size // cut.runs // ranks
            if share % group:
                groups = size // cut.runs // group
                works = [n for n in range(2, groups + 1) if groups % n == 0 and per_run % n == 0]
                return [
                    (
                        f"{leaf.path}: {share} inputs a rank would cut a quantisation group of {group} "
                        f"({size // cut.runs} inputs are {size // cut.runs / group:g} groups; "
                        f"ranks that work: {', '.join(map(str, works[:6])) or 'none'})"
                    )
                ]
        return []


replicated = Placement()
replicated_partial = Placement(partial=True)
"""The whole projection on every rank, applied to a partial sum before the block adds it up."""
replicated_after_sum = Placement(reduce=("sum_input",))
"""The whole projection on every rank, applied to an input that is summed over the ranks first."""


def column(units: str | None = None, reduce: tuple[Reduce, ...] = (), what: str = "features") -> Split:
    """Column parallel: each rank computes a share of the outputs from the whole input."""
    return Split(axis=OUT, units=units, reduce=reduce, what=what)


def heads(units: str, runs: str | None = None) -> Split:
    """Column parallel in whole attention heads; with `runs`, interleaved over that many groups."""
    return Split(axis=OUT, units=units, runs=runs, what="heads")


def row(units: str | None = None, reduce: tuple[Reduce, ...] = (), what: str = "features") -> Split:
    """Row parallel: each rank computes a partial sum of every output from its share of the inputs."""
    return Split(axis=IN, units=units, reduce=reduce, what=what)


def stacked(units: str) -> Split:
    """Whole members of a stack, such as the output groups of a grouped projection."""
    return Split(axis=STACK, units=units, what="output groups")


def vector(units: str, runs: str | None = None, what: str = "heads") -> Split:
    """A bare array with one value a piece, such as attention sinks: sliced as the pieces are."""
    return Split(axis=-1, units=units, runs=runs, what=what)


@dataclass(frozen=True)
class Native:
    """A sum that the model's own forward pass does once its block is handed a group.

    Attributes:
        attribute: Attribute of the block that receives the group.
        output: Child of the block whose output width is that of the summed vector.
    """

    attribute: str
    output: str


@dataclass(frozen=True)
class Block:
    """What a family's table says of one class of modules.

    Attributes:
        cls: The class' name in the family's module.
        places: Child (dotted path of a module or an array below the block) to placement.
        divide: Integer attributes that become 1/N of themselves.
        native: The sum that the block does by itself, if it has one.
    """

    cls: str
    places: Mapping[str, Placement]
    divide: tuple[str, ...] = ()
    native: Native | None = None
