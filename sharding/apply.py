"""A plan applied to a model: slice, detach, free, layer by layer.

A slice is a contiguous copy, since a view would keep the whole array in memory. Equal slices of several
strategies in one process are held once, in a `Pool`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sharding import collectives
from sharding.load import Progress
from sharding.placement import Placement, Share
from sharding.plan import Plan
from sharding.tree import assign, at, stages

WRAPPERS: dict[tuple[str, ...], type[collectives.Communicating]] = {
    ("sum_output",): collectives.AllSumAfter,
    ("sum_input",): collectives.AllSumBefore,
    ("sum_input", "gather_output"): collectives.SumThenGather,
}


class Pool:
    """One rank's arrays, held once however many strategies use them.

    Slices made from a plan are found by what they are (parameter and cut); arrays of foreign code by their
    path and content.
    """

    def __init__(self) -> None:
        self._by_share: dict[tuple[str, Share, int], mx.array] = {}
        self._by_path: dict[str, list[mx.array]] = {}
        self.shared_bytes = 0
        """Bytes that were not allocated a second time."""

    def find(self, path: str, share: Share, ranks: int) -> mx.array | None:
        """The array of an earlier model with the same parameter cut the same way."""
        found = self._by_share.get((path, share, ranks))
        if found is not None:
            self.shared_bytes += found.nbytes
        return found

    def add(self, path: str, array: mx.array, share: Share = None, ranks: int | None = None) -> None:
        """Remember an evaluated array under its path, and under its cut where a plan made it."""
        if ranks is not None:
            self._by_share[(path, share, ranks)] = array
        held = self._by_path.setdefault(path, [])
        if all(other is not array for other in held):
            held.append(array)

    def equal(self, path: str, array: mx.array) -> mx.array:
        """An earlier array at the same path with the same content, or `array` itself."""
        for other in self._by_path.get(path, ()):
            same = other.shape == array.shape and other.dtype == array.dtype
            if same and (other is array or mx.array_equal(other, array).item()):
                self.shared_bytes += array.nbytes
                return other
        return array


def shard(
    model: nn.Module,
    plan: Plan,
    group: Any,
    *,
    pool: Pool | None = None,
    evaluate: bool = True,
    progress: Progress = lambda: None,
) -> nn.Module:
    """Turn the whole model into this rank's share, in place.

    Args:
        model: The whole model in eval mode, best unevaluated.
        plan: Made for this model and this world size.
        group: The ranks; `rank()` and `size()` are what is used here.
        pool: Shares equal slices with other models of this process.
        evaluate: False leaves the slices lazy (for traces).
        progress: Called after each layer.

    Returns:
        The same model. At world size 1 nothing is changed or wrapped.
    """
    rank, ranks = group.rank(), group.size()
    if ranks != plan.ranks:
        raise ValueError(f"a plan for {plan.ranks} ranks can't be applied to a group of {ranks}")
    for paths in stages(model):
        for path in paths:
            share = plan.cuts[path]
            ready = pool.find(path, share, ranks) if pool is not None else None
            if ready is None and share is not None and ranks > 1:
                ready = share.take(at(model, path), rank, ranks)
            if ready is not None:
                assign(model, path, ready)
        if evaluate:
            mx.eval([at(model, path) for path in paths])
            mx.clear_cache()
            if pool is not None:
                for path in paths:
                    pool.add(path, at(model, path), plan.cuts[path], ranks)
            progress()
    if ranks > 1:
        for path, attribute in plan.divide:
            host = at(model, path)
            setattr(host, attribute, getattr(host, attribute) // ranks)
        for path, attribute in plan.groups:
            setattr(at(model, path), attribute, group)
        for path, placement in plan.wraps:
            assign(model, path, wrapper(placement)(at(model, path), group))
    return model


def wrapper(placement: Placement) -> type[collectives.Communicating]:
    """The layer that does what a placement's `reduce` says."""
    return WRAPPERS[placement.reduce]


def settle_shared(model: nn.Module, pool: Pool, progress: Progress = lambda: None) -> None:
    """Evaluate a model that foreign code has split, layer by layer, sharing arrays equal to the pool's."""
    for paths in stages(model):
        mx.eval([at(model, path) for path in paths])
        for path in paths:
            plain = path.replace(".inner.", ".")
            array = pool.equal(plain, at(model, path))
            assign(model, path, array)
            pool.add(plain, array)
        mx.clear_cache()
        progress()
