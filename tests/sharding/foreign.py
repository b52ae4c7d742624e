"""Sharding functions that users might bring: right ones, wrong ones and rude ones.

--strategy tests.sharding.foreign:splits_in_place
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

NOT_CALLABLE = 3


def splits_in_place(model: nn.Module, group: Any) -> None:
    """The model's own `shard()`, as a user would call it."""
    model.shard(group)


class Wrapped(nn.Module):
    """A module around the split model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of the model inside."""
        return self.model.layers

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self.model(*args, **kwargs)


def returns_a_module(model: nn.Module, group: Any) -> nn.Module:
    """Another module than the one it was given."""
    model.shard(group)
    return Wrapped(model)


def returns_a_number(model: nn.Module, group: Any) -> int:
    """No module."""
    return group.size()


def raises(model: nn.Module, group: Any) -> None:
    """An exception with several lines."""
    raise RuntimeError(f"no way to split\nover {group.size()}")


def evaluates(model: nn.Module, group: Any) -> None:
    """Evaluates its arrays on the way, as loading code does."""
    model.shard(group)
    mx.eval(model.parameters())
    mx.async_eval(model.parameters())


def trains(model: nn.Module, group: Any) -> None:
    """Leaves the model in training mode."""
    model.shard(group)
    model.train()


class Summed(nn.Module):
    """A layer and a number of needless sums after it."""

    def __init__(self, inner: nn.Module, group: Any, sums: int) -> None:
        super().__init__()
        self.inner, self.group, self.sums = inner, group, sums

    def __call__(self, x: mx.array) -> mx.array:
        y = self.inner(x)
        for _ in range(self.sums):
            y = mx.distributed.all_sum(y, group=self.group) / self.group.size()
        return y


def differs_by_rank(model: nn.Module, group: Any) -> None:
    """Rank r adds r needless sums after the final norm: ranks that would wait for each other for ever."""
    model.model.norm = Summed(model.model.norm, group, group.rank())


def sums_more_on_rank_one(model: nn.Module, group: Any) -> None:
    """As above, in modules of the same shapes: only the forward pass tells the ranks apart."""
    model.model.norm = Summed(model.model.norm, group, 1 + group.rank())


def keeps_all_on_rank_zero(model: nn.Module, group: Any) -> None:
    """Rank 0 keeps everything, the others keep half of the first MLP."""
    if group.rank():
        mlp = model.model.layers[0].mlp
        mlp.up_proj.weight = mlp.up_proj.weight[:128]
        mlp.gate_proj.weight = mlp.gate_proj.weight[:128]
        mlp.down_proj.weight = mlp.down_proj.weight[:, :128]


class Namespace:
    """Functions may be attributes of something."""

    @staticmethod
    def split(model: nn.Module, group: Any) -> None:
        """As `splits_in_place`."""
        model.shard(group)
