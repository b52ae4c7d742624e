"""`--strategy`: a built-in table, `upstream` (the model's own `shard()`), or anyone's `package.module:function`.

All three answer the same two questions: what would you do (a plan, or a trace), and do it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from sharding.apply import Pool, settle_shared, shard
from sharding.errors import BadRequest, Rejected
from sharding.families.registry import family_of
from sharding.load import Progress, settle
from sharding.placement import Block
from sharding.plan import Plan, Reading, read_table

UPSTREAM = "upstream"
ShardFunction = Callable[[nn.Module, Any], nn.Module | None]


@dataclass(frozen=True)
class Strategy:
    """One way to split one model type.

    Attributes:
        name: As given on the command line.
        model_type: The config's `model_type`.
        table: The family's table, for built-in strategies.
        function: Foreign code, `(model, group) -> model | None`.
    """

    name: str
    model_type: str
    table: tuple[Block, ...] | None = None
    function: ShardFunction | None = None

    @property
    def family(self) -> str:
        """The family's name, or "no table"."""
        family = family_of(self.model_type)
        return family.name if family else "no table"

    @property
    def foreign(self) -> bool:
        """Whether the code that splits is not ours."""
        return self.table is None

    @property
    def expected(self) -> str:
        """The outcome that a check of it is known to have: "ok", or "wrong" where upstream has a known fault."""
        family = family_of(self.model_type)
        return "wrong" if family and self.name in family.known_wrong else "ok"

    @property
    def users_own(self) -> bool:
        """Whether it is a `package.module:function`."""
        return ":" in self.name

    def read(self, model: nn.Module) -> Reading:
        """A built-in strategy's table laid on a model."""
        family = family_of(self.model_type)
        if self.table is None or family is None:
            raise ValueError(f"{self.name} has no table; it is traced")
        return read_table(
            model,
            self.table,
            family=family.name,
            strategy=self.name,
            module=family.module(self.model_type),
        )

    def plan(self, model: nn.Module, ranks: int) -> Plan:
        """The plan of a built-in strategy.

        Raises:
            Rejected: With the reasons.
        """
        return self.read(model).plan(ranks)

    def apply(
        self,
        model: nn.Module,
        group: Any,
        *,
        pool: Pool | None = None,
        evaluate: bool = True,
        progress: Progress = lambda: None,
    ) -> nn.Module:
        """Turn the whole, unevaluated model into this rank's share.

        At world size 1 the model stays as it is: the baseline is the model that was never split.

        Raises:
            Rejected: The plan says no, with the reasons.
            Exception: Whatever foreign code raises.
        """
        if group.size() == 1:
            if evaluate:
                settle(model, progress)
            return model
        if not self.foreign:
            plan = self.plan(model, group.size())
            return shard(model, plan, group, pool=pool, evaluate=evaluate, progress=progress)
        assert self.function is not None
        replaced = self.function(model, group)
        result = model if replaced is None else replaced
        if not isinstance(result, nn.Module):
            raise TypeError(
                f"{self.name} returned {type(result).__name__}; it must return an nn.Module or None"
            )
        result.eval()
        if evaluate:
            settle_shared(result, pool if pool is not None else Pool(), progress)
        return result


def built_in(model_type: str) -> list[str]:
    """Names of the strategies that this project has for a model type, `upstream` last."""
    family = family_of(model_type)
    return [*(family.strategies if family else ()), UPSTREAM]


def resolve(name: str, model_type: str) -> Strategy:
    """Find a strategy by its name.

    Raises:
        BadRequest: Unknown, or not importable.
    """
    family = family_of(model_type)
    if ":" in name:
        return Strategy(name, model_type, function=_import(name))
    if name == UPSTREAM:
        return Strategy(name, model_type, function=_upstream)
    if family is not None and name in family.strategies:
        return Strategy(name, model_type, table=family.strategies[name])
    raise BadRequest(
        f"--strategy {name!r}: unknown for model_type {model_type!r}; choose one of "
        f"{', '.join(built_in(model_type))}, or package.module:function"
    )


def _upstream(model: nn.Module, group: Any) -> None:
    """The model's own `shard()`, untouched."""
    if not hasattr(model, "shard"):
        raise Rejected([f"{type(model).__module__} has no shard() of its own"])
    model.shard(group)


def _import(name: str) -> ShardFunction:
    dotted, _, attribute = name.partition(":")
    try:
        function: Any = importlib.import_module(dotted)
        for part in attribute.split("."):
            function = getattr(function, part)
    except (
        Exception,
        SystemExit,
    ) as error:  # Foreign modules may raise anything on import, or end the program.
        raise BadRequest(
            f"--strategy {name!r}: can't be imported ({type(error).__name__}: {error}); "
            "give package.module:function that Python finds from here"
        ) from error
    if not callable(function):
        raise BadRequest(
            f"--strategy {name!r}: {attribute} is not callable; expected (model, group) -> model | None"
        )
    return function
