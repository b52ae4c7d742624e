"""What a split costs: bytes held, replicated, read per decode step, and in memory while it loads.

All of it is arithmetic on shapes of unevaluated models. Reading is counted per decode step of the whole
batch: every weight once, but for lookups (one row a sequence) and stacked experts, of which a batch of B
sequences with k of E experts each touches E * (1 - (1 - k/E)^B) in the mean when routing is even; at
batch 1 that is k exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from sharding.placement import Cut
from sharding.plan import Plan
from sharding.tree import LAYER


@dataclass(frozen=True)
class Parameter:
    """One array of the whole model.

    Attributes:
        path: Dotted path.
        shape: Its shape.
        nbytes: Its size in bytes.
        count: Logical parameters it holds: unpacked, and none for scales of a quantised weight.
        lookup: Rows of a table of which a step reads one a sequence; 0 where it reads everything.
        experts: Stacked experts; 0 where it is not a stack.
        unpacked: Bytes of the float32 array that a quantised one is made from; 0 where it is not quantised.
    """

    path: str
    shape: tuple[int, ...]
    nbytes: int
    count: int
    lookup: int
    experts: int
    unpacked: int = 0

    def fraction(self, batch: int, top_k: int) -> float:
        """The share of the array that one decode step reads."""
        if self.lookup:
            return min(1.0, batch / self.lookup)
        if self.experts and top_k:
            return 1 - (1 - min(1.0, top_k / self.experts)) ** batch
        return 1.0


def parameters(
    model: nn.Module, integers: Mapping[str, str] | None = None, tied: bool | None = None
) -> list[Parameter]:
    """Every array of a model.

    Args:
        model: Unevaluated is enough.
        integers: Names of integer lookup tables (see `Family.integers`).
        tied: Whether the embedding is the head as well and so read whole; None: when there is no `lm_head`.
    """
    found = []
    if tied is None:
        tied = not any(path.endswith("lm_head") for path, _ in model.named_modules())
    for path, module in model.named_modules():
        kind = type(module).__name__
        packed = "scales" in module and hasattr(module, "bits")
        for name, value in module.items():
            if not isinstance(value, mx.array) or name.startswith("_"):
                continue
            if packed and name == "weight":
                count = value.size * 32 // module.bits
            else:
                count = 0 if packed and name in ("scales", "biases") else value.size
            is_lookup = ("Embedding" in kind and not tied) or name in (integers or {})
            found.append(
                Parameter(
                    path=f"{path}.{name}" if path else name,
                    shape=tuple(value.shape),
                    nbytes=value.nbytes,
                    count=count,
                    lookup=value.shape[0] if is_lookup else 0,
                    experts=value.shape[0] if "Switch" in kind and value.ndim > 1 else 0,
                    unpacked=4 * count if packed and name == "weight" else 0,
                )
            )
    return found


@dataclass(frozen=True)
class Weights:
    """Weight bytes of one rank.

    Attributes:
        held: Bytes held.
        replicated: Bytes of arrays that every rank holds whole (0 at world size 1).
        read: Bytes read in one decode step of the batch.
        load_peak: Bytes at the worst moment of loading.
    """

    held: int
    replicated: int
    read: int
    load_peak: int


def planned_weights(
    whole: list[Parameter], plan: Plan, batch: int, top_k: int, *, quantising: bool = False
) -> Weights:
    """One rank's bytes under a plan; shares are equal, so it is every rank's.

    Args:
        whole: Every array of the whole model.
        plan: Which part of each a rank keeps.
        batch: Sequences decoded at once.
        top_k: Experts that a token is routed to.
        quantising: Whether weights are quantised while they load, so that a layer's float weights are there too.
    """
    shares = {
        p.path: p.nbytes // plan.ranks if isinstance(plan.cuts[p.path], Cut) else p.nbytes for p in whole
    }
    return _weights(whole, whole, shares, plan.ranks, batch, top_k, quantising)


def measured_weights(
    whole: list[Parameter],
    own: list[Parameter],
    ranks: int,
    batch: int,
    top_k: int,
    *,
    quantising: bool = False,
) -> Weights:
    """One rank's bytes, from the arrays that foreign code left it (`own`); the rest as in `planned_weights`."""
    return _weights(whole, own, {p.path: p.nbytes for p in own}, ranks, batch, top_k, quantising)


def _weights(
    whole: list[Parameter],
    own: list[Parameter],
    shares: dict[str, int],
    ranks: int,
    batch: int,
    top_k: int,
    quantising: bool,
) -> Weights:
    by_path = {p.path: p for p in whole}
    full = {p.path: p.nbytes for p in whole}
    held = sum(shares.values())
    kept = sum(nbytes for path, nbytes in shares.items() if nbytes == full.get(path.replace(".inner.", ".")))
    per_stage: dict[str, int] = {}
    for p in whole:
        match = LAYER.search(p.path)
        stage = p.path[: match.end()] if match else ""
        passing = (p.nbytes if shares.get(p.path) != p.nbytes else 0) + (p.unpacked if quantising else 0)
        per_stage[stage] = per_stage.get(stage, 0) + passing
    return Weights(
        held=held,
        replicated=kept if ranks > 1 else 0,
        # Which part of a stack or table is read is a property of the whole model: a rank that holds a few whole
        # experts still reads those that tokens are routed to out of all.
        read=round(
            sum(
                shares[p.path] * by_path.get(p.path.replace(".inner.", "."), p).fraction(batch, top_k)
                for p in own
            )
        ),
        load_peak=held + max(per_stage.values(), default=0),
    )
