"""Placements and modules that are wrong on purpose, for the catalogue of faults."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sharding.placement import Cut, Cuts, Leaf, Once, Split


class FromRankZero(Cut):
    """A cut that every rank takes at rank 0's place."""

    def take(self, array: mx.array, rank: int, ranks: int) -> mx.array:
        """Rank 0's share."""
        del rank
        return super().take(array, 0, ranks)


class OnEveryRank(Split):
    """A split whose bias every rank keeps, though the block adds all of them up."""

    def cuts(self, leaf: Leaf) -> Cuts:
        """As the split, without `Once`."""
        return {name: None if isinstance(cut, Once) else cut for name, cut in super().cuts(leaf).items()}


class AtRankZero(Split):
    """A split that leaves every rank with rank 0's share."""

    def cuts(self, leaf: Leaf) -> Cuts:
        """As the split, from rank 0."""
        cut = self._cut(leaf)
        return dict.fromkeys(super().cuts(leaf), FromRankZero(cut.axis, cut.units, cut.runs))


class Nothing(nn.Module):
    """A shared expert that adds nothing."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.zeros_like(x)


class AddsSharedAfterwards(nn.Module):
    """A MoE block whose shared experts are added to the sum of the ranks."""

    def __init__(self, moe: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.moe, self.shared = moe, shared

    def __call__(self, x: mx.array, *args: Any, residual: Any = None) -> mx.array:
        y = self.moe(x, *args) + self.shared(x)
        from mlx_vlm.models.switch_layers import SwitchGLU

        return SwitchGLU._combine(y, None, None, residual)
