"""A `Plan`: what each rank keeps of every parameter, which modules change, and which collectives follow.

The plan is made on the real model, built lazily: shapes, head counts and layer kinds come from the modules
themselves. Every leaf parameter must be claimed by exactly one entry of a table, so that a parameter that a
new release of a model brings is refused by name and not replicated in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from sharding.errors import Rejected
from sharding.placement import OUT, Block, Collective, Leaf, Placement, Share
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


@dataclass(frozen=True)
class Reading:
    """A table laid on a model: what does not depend on the number of ranks.

    Attributes:
        family: The family's name.
        strategy: The strategy's name.
        leaves: Each leaf that an entry of the table places, with its placement.
        cuts: Parameter path to its share.
        divide: (module path, attribute, value) of integers to divide.
        natives: (module path, attribute, the block's output) of sums that upstream's forward does.
        faults: Parameters that no entry covers, or two; a model with any can't be planned.
    """

    family: str
    strategy: str
    leaves: tuple[tuple[Leaf, Placement], ...]
    cuts: dict[str, Share]
    divide: tuple[tuple[str, str, int], ...]
    natives: tuple[tuple[str, str, Leaf], ...]
    faults: tuple[str, ...]

    def plan(self, ranks: int) -> Plan:
        """The plan for a world size.

        Raises:
            Rejected: With every reason why this model can't be split this way.
        """
        if ranks < 1:
            raise ValueError(f"a plan is for at least 1 rank, not {ranks}")
        reasons = [line for leaf, placement in self.leaves for line in placement.problems(leaf, ranks)]
        reasons += [
            f"{_join(path, attribute)}: {count} does not divide by {ranks} ranks"
            for path, attribute, count in self.divide
            if count % ranks
        ]
        reasons += self.faults
        if reasons:
            raise Rejected(collapse(reasons))
        several = ranks > 1
        wraps = [(leaf.path, placement) for leaf, placement in self.leaves if placement.reduce and several]
        asked = [
            collective
            for leaf, placement in self.leaves
            if placement.reduce and several
            for collective in placement.collectives(leaf, ranks)
        ]
        asked += [Collective("all_sum", out.size(OUT), path) for path, _, out in self.natives if several]
        return Plan(
            family=self.family,
            strategy=self.strategy,
            ranks=ranks,
            cuts=self.cuts,
            divide=tuple((path, attribute) for path, attribute, _ in self.divide),
            wraps=tuple(wraps),
            groups=tuple((path, attribute) for path, attribute, _ in self.natives if several),
            collectives=tuple(asked),
        )


def read_table(
    model: nn.Module, blocks: Sequence[Block], *, family: str, strategy: str, module: str
) -> Reading:
    """Lay a table on a model.

    Args:
        model: The whole model; nothing is evaluated.
        blocks: The strategy's table.
        family: The family's name, for the record.
        strategy: The strategy's name, for the record.
        module: Python module in which the table's classes are defined.
    """
    tables = {block.cls: block for block in blocks}
    leaves: list[tuple[Leaf, Placement]] = []
    cuts: dict[str, Share] = {}
    divide: list[tuple[str, str, int]] = []
    natives: list[tuple[str, str, Leaf]] = []
    faults: list[str] = []
    for path, host in modules_of(model, list(tables), module).items():
        block = tables[type(host).__name__]
        divide += [(path, attribute, int(getattr(host, attribute))) for attribute in block.divide]
        for name, placement in block.places.items():
            target = _child(host, name)
            if target is None:
                continue
            leaf = Leaf(_join(path, name), target, host)
            leaves.append((leaf, placement))
            claimed = {_join(leaf.path, below): cut for below, cut in placement.cuts(leaf).items()}
            faults += [f"{p}: claimed by two entries of the table" for p in claimed if p in cuts]
            cuts |= claimed
        if block.native is not None:
            output = _child(host, block.native.output)
            natives.append(
                (path, block.native.attribute, Leaf(_join(path, block.native.output), output, host))
            )
    faults += [
        f"{path}: no entry of the {family} table covers this parameter"
        for path in parameters_of(model)
        if path not in cuts
    ]
    return Reading(family, strategy, tuple(leaves), cuts, tuple(divide), tuple(natives), tuple(faults))


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


def collapse(reasons: Sequence[str]) -> list[str]:
    """Fold lines that differ only in the layer's number into one that counts the layers."""
    folded: dict[str, list[str]] = {}
    for line in reasons:
        parts = line.split(".")
        general = ".".join(
            "*" if i and parts[i - 1] == "layers" and part.isdigit() else part for i, part in enumerate(parts)
        )
        folded.setdefault(general, []).append(line)
    return [
        lines[0] if len(lines) == 1 else f"{general} ({len(lines)} layers)"
        for general, lines in folded.items()
    ]
