"""Is a split model in the timed type (bfloat16, 4 bits) as good as the unsharded one in that type?

Right or wrong is decided in float32 (`harness.equivalence`). In bfloat16 correct splits already differ by as much as
some faults do, so all that can be asked there is statistical: the split model must be no further from the float32
reference than the unsharded model of the same type is, up to a stated factor. That finds what goes wrong in that type
only (a sum taken in too few bits, a cast in the wrong place).

    base = spread(unsharded_bf16, reference)          # one rank
    reasons = check_spread(spread(split_bf16, reference), base)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from harness.equivalence import compare_ends, kept_rows
from harness.passes import run_passes
from harness.reference import Reference

SPREAD_FACTOR = 2.0
ROWS_FACTOR = 4.0
"""How many times further from the float32 reference a split model may be than the unsharded one of its type:
SPREAD_FACTOR + ROWS_FACTOR / sqrt(rows).

Measured on correct splits: 0.9 to 1.2 times over 86 rows or more, dense in bfloat16 and with 32 experts at 4 bits; 0.7
to 1.9 times over 9 rows, where a few tokens whose experts change decide."""

_FLOOR = 2.0**-20
"""What rounding alone does where both models are nearly exact, say because the timed type is float32."""


@dataclass(frozen=True)
class Spread:
    """How far a model's logits are from the float32 reference's.

    Attributes:
        rms: root mean square difference, relative to the root mean square of the reference's logits.
        kl: Kullback-Leibler divergence, nats a token, mean.
        rows: tokens compared; where that wasn't kept, as many as in the spread beside it.
    """

    rms: float
    kl: float
    rows: int = 1 << 30

    def __post_init__(self) -> None:
        if not (self.rms >= 0 and self.kl >= 0 and self.rows >= 1):
            raise ValueError(f"a spread is never negative, NaN or of nothing: {self}")


def spread(model: nn.Module, reference: Reference) -> Spread:
    """Run a model of the same weights, in its own types, on the reference's tokens: infinite if it gives NaN."""
    ends: list[mx.array] = []
    run_passes(
        model,
        reference.prompt,
        reference.teacher,
        reference.prefill_step,
        lambda call, logits: ends.append(kept_rows(logits, reference, call).astype(mx.float32)),
    )
    comparison = compare_ends(ends, reference)
    if comparison.distance.problem is not None:
        return Spread(math.inf, math.inf, 1)
    own = np.concatenate([np.array(e, dtype=np.float64).ravel() for e in reference.logits])
    return Spread(comparison.rms / math.sqrt(float(np.mean(own**2))), comparison.kl_mean, comparison.rows)


def check_spread(split: Spread, unsharded: Spread) -> list[str]:
    """Reasons why a split model is further off than its type's rounding explains; none if it isn't.

    KL divergence grows with the square of a difference, so its factor is the square.
    """
    if not (math.isfinite(unsharded.rms) and math.isfinite(unsharded.kl)):
        return ["the unsharded model in the timed type gives nothing to compare with"]
    factor = SPREAD_FACTOR + ROWS_FACTOR / math.sqrt(min(split.rows, unsharded.rows))
    reasons = []
    for name, value, base, times in (
        ("root mean square distance", split.rms, unsharded.rms, factor),
        ("KL divergence", split.kl, unsharded.kl, factor**2),
    ):
        if not value <= times * base + _FLOOR:
            reasons.append(
                f"in the timed type the split model's {name} from the float32 reference is {value:.2g}, "
                f"the unsharded model's {base:.2g}: more than {times:.2g} times as far"
            )
    return reasons
