"""The layers that communicate: wrapped around a projection by `apply`, one collective per call.

A wrapper is never an instance of the layer it wraps. Upstream code takes fast paths for known classes by
reading their weights directly, and such a path would step over the collective without a word.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Communicating(nn.Module):
    """A projection and the group it reduces over.

    Args:
        inner: One rank's share of the projection. A `bias` is taken out of it where it must be added once.
        group: The ranks.
    """

    def __init__(self, inner: nn.Module, group: Any) -> None:
        super().__init__()
        self.inner = inner
        self.group = group

    @property
    def training(self) -> bool:
        """Always true, so that upstream's helpers call this layer whole.

        mlx-vlm's `linear` calls a layer in eval mode once per token for chunks of 2 to 8 tokens, which
        would be one collective per token where a chunk needs one.
        """
        return True


class AllSumAfter(Communicating):
    """Row parallel: partial outputs (..., out) are summed over the ranks, then the bias is added once."""

    def __init__(self, inner: nn.Module, group: Any) -> None:
        super().__init__(inner, group)
        if "bias" in inner:
            self.bias = inner["bias"]
            del inner["bias"]

    def __call__(self, x: mx.array) -> mx.array:
        """Project (..., in / N) and sum over the ranks."""
        y = mx.distributed.all_sum(self.inner(x), group=self.group)
        return y + self["bias"] if "bias" in self else y


class AllSumBefore(Communicating):
    """The input (..., in) is a partial sum: sum it over the ranks, then apply the whole projection."""

    def __call__(self, x: mx.array) -> mx.array:
        """Sum over the ranks and project."""
        return self.inner(mx.distributed.all_sum(x, group=self.group))


def all_gather_features(x: mx.array, group: Any) -> mx.array:
    """Join (..., f) of every rank to (..., N * f), in rank order."""
    n = group.size()
    if n == 1:
        return x
    # all_gather joins along the first axis, so the ranks get an axis of their own there.
    parts = mx.distributed.all_gather(x[None], group=group)
    return mx.concatenate([parts[i] for i in range(n)], axis=-1)


class SumThenGather(Communicating):
    """The input is a partial sum and the projection is column parallel: all_sum, project, all_gather."""

    def __call__(self, x: mx.array) -> mx.array:
        """Sum (..., in) over the ranks, project to (..., out / N), gather (..., out)."""
        return all_gather_features(self.inner(mx.distributed.all_sum(x, group=self.group)), self.group)
