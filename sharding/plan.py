"""A `Plan`: what each rank keeps of every parameter, which modules change, and which collectives follow.

The plan is made on the real model, built lazily: shapes, head counts and layer kinds come from the modules
themselves. Every leaf parameter must be claimed by exactly one entry of a table, so that a parameter that a
new release of a model brings is refused by name and not replicated in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sharding.errors import Rejected
from sharding.placement import OUT, Block, Collective, Cut, Leaf, Placement, Share
from sharding.tree import parameters_of


@dataclass(frozen=True)
class Plan:
    """How one model is split over `ranks` by one strategy.

    Attributes:
        family: The family whose table was read; "" when the plan was traced from foreign code.
        strategy: The strategy's name.
        ranks: World size.
        cuts: Parameter path to its cut; None means that every rank keeps the whole.
        divide: (module path, attribute) of integers that become 1/N of themselves.
        wraps: (module path, placement) of layers that get a collective around them, with a placement
            whose `reduce` says which.
        groups: (module path, attribute) that receive the group, for sums that upstream's forward does.
        collectives: One entry per collective of a decode step.
    """

    family: str
    strategy: str
    ranks: int
    cuts: dict[str, Share] = field(repr=False)
    divide: tuple[tuple[str, str], ...] = field(repr=False)
    wraps: tuple[tuple[str, Placement], ...] = field(repr=False)
    groups: tuple[tuple[str, str], ...] = field(repr=False)
    collectives: tuple[Collective, ...] = field(repr=False)


def modules_of(model: nn.Module, names: Sequence[str], module: str) -> dict[str, nn.Module]:
    """Path to module, for modules whose class is one of `names` defined in the Python module `module`.

    Keyed by the defining module too, since transformers has classes of the same names.
    """
    found = {}
    for path, child in model.named_modules():
        cls = type(child)
        if cls.__module__ == module and cls.__name__ in names:
            found[path] = child
    return found


def make_plan(
    model: nn.Module,
    blocks: Sequence[Block],
    ranks: int,
    *,
    family: str,
    strategy: str,
    module: str,
) -> Plan:
    """Read a table against a model.

    Args:
        model: The whole model; nothing is evaluated.
        blocks: The strategy's table.
        ranks: World size, at least 1.
        family: The family's name, for the record.
        strategy: The strategy's name, for the record.
        module: Python module in which the table's classes are defined.

    Raises:
        Rejected: With every reason why this model can't be split this way.
    """
    if ranks < 1:
        raise ValueError(f"a plan is for at least 1 rank, not {ranks}")
    tables = {block.cls: block for block in blocks}
    hosts = modules_of(model, list(tables), module)
    parameters = parameters_of(model)
    cuts: dict[str, Share] = {}
    reasons: list[str] = []
    divide: list[tuple[str, str]] = []
    wraps: list[tuple[str, Placement]] = []
    groups: list[tuple[str, str]] = []
    collectives: list[Collective] = []

    for path, host in hosts.items():
        block = tables[type(host).__name__]
        for attribute in block.divide:
            count = int(getattr(host, attribute))
            if count % ranks:
                reasons.append(f"{_join(path, attribute)}: {count} does not divide by {ranks} ranks")
            divide.append((path, attribute))
        for name, placement in block.places.items():
            target = _child(host, name)
            if target is None:
                continue
            leaf = Leaf(_join(path, name), target, host)
            problems = placement.problems(leaf, ranks)
            reasons += problems
            claimed = {_join(leaf.path, below): cut for below, cut in placement.cuts(leaf).items()}
            reasons += [f"{p}: claimed by two entries of the table" for p in claimed if p in cuts]
            cuts |= claimed
            if placement.reduce and ranks > 1:
                wraps.append((leaf.path, placement))
                collectives += placement.collectives(leaf, ranks)
        if block.native is not None and ranks > 1:
            groups.append((path, block.native.attribute))
            output = Leaf(_join(path, block.native.output), _child(host, block.native.output), host)
            collectives.append(Collective("all_sum", output.size(OUT), path))

    reasons += [
        f"{path}: no entry of the {family} table covers this parameter"
        for path in parameters
        if path not in cuts
    ]
    if reasons:
        raise Rejected(_once(reasons))
    return Plan(
        family=family,
        strategy=strategy,
        ranks=ranks,
        cuts=cuts,
        divide=tuple(divide),
        wraps=tuple(wraps),
        groups=tuple(groups),
        collectives=tuple(collectives),
    )


def share_shape(array: mx.array, cut: Share, ranks: int) -> tuple[int, ...]:
    """Shape of one rank's share of `array`; with equal shares it is every rank's."""
    shape = list(array.shape)
    if isinstance(cut, Cut):
        shape[array.ndim + cut.axis] //= ranks
    return tuple(shape)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _child(host: nn.Module, dotted: str) -> Any:
    """A module or array below `host`, or None: not every layer of a family has every child."""
    current: Any = host
    for name in dotted.split("."):
        current = current.get(name) if isinstance(current, dict) else None
        if current is None:
            return None
    return current


def _once(reasons: list[str]) -> list[str]:
    """Reasons that differ only in the layer's number become one, with the number of layers."""
    return collapse(reasons, lambda line: line)


def collapse(reasons: list[str], key: Callable[[str], str]) -> list[str]:
    """Fold lines about `layers.0.`, `layers.1.`, ... into one line that counts them."""
    folded: dict[str, list[str]] = {}
    for line in reasons:
        parts = key(line).split(".")
        general = ".".join(
            "*" if i and parts[i - 1] == "layers" and p.isdigit() else p for i, p in enumerate(parts)
        )
        folded.setdefault(general, []).append(line)
    return [
        lines[0] if len(lines) == 1 else f"{general} ({len(lines)} layers)"
        for general, lines in folded.items()
    ]
