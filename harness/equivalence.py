"""Is a split model still the same model? Two passes against a reference, and a verdict.

    report = verify(split, reference)            # on every rank, at the same time
    report = merge([report of each rank])        # anywhere
    report.outcome, report.first_divergence      # "wrong", {"layer": 0, "module": "attn"}

The forced pass gives each block the unsharded model's input for it (`harness.taps.Forcer`): it finds every wrong block
and inherits nothing. Its logits, computed from the reference's last block, are off only if something after the blocks
is: norm or head. The free pass runs the split model by itself on the reference's tokens, prompt and then decode steps
through the cache: what adds up, and what only happens now and then, shows there. Both are held against tolerances
that were measured on the reference (`harness.noise`).

This decides, in float32. The timed type is then checked statistically (`harness.precision`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from harness.distance import Distance, LogitsComparison, Tolerance, compare_logits, distance
from harness.noise import largest_smooth
from harness.passes import run_passes
from harness.reference import Reference
from harness.taps import Block, BlockDistance, Forcer

ENDS = ("end to end", "ragged batch")
"""Places of a divergence that no block explains."""


@dataclass(frozen=True)
class Divergence:
    """The first place, in the order of execution, that is further off than tolerated.

    Attributes:
        layer: its number, or None for what comes after the last block.
        module: the block's name in the layer; "head" after the last; "end to end" if every block by itself is fine.
        what: "output" of the block, "input" (what stands before it differs: norm, residual, embedding), or "logits".
        call: the forward pass: chunks of the prompt first, then decode steps.
        order: counts visits of blocks over all passes.
    """

    layer: int | None
    module: str
    what: str
    call: int
    order: int
    distance: Distance
    tolerance: Tolerance

    def place(self) -> dict[str, Any]:
        """Where it is, as records and `--json` show it."""
        return {
            "layer": self.layer,
            "module": self.module if self.what != "input" else f"input of {self.module}",
        }

    def describe(self, prompt_passes: int) -> str:
        """One line for a reader."""
        when = (
            "in the prompt"
            if self.call < prompt_passes
            else f"at decode step {self.call - prompt_passes + 1}"
        )
        where = self.module if self.layer is None else f"layer {self.layer} {self.place()['module']}"
        if self.distance.problem is not None:
            return f"{where} {when}: {self.distance.problem}"
        row = not self.distance.relative > self.tolerance.relative
        far = self.distance.row_relative if row else self.distance.relative
        allowed = self.tolerance.row_relative if row else self.tolerance.relative
        token = " of one token's values" if row else ""
        return f"{where} {when}: off by {far:.2g}{token}, {allowed:.2g} is rounding (relative)"


@dataclass(frozen=True)
class Report:
    """What one rank, or after `merge` all ranks together, found.

    Attributes:
        outcome: "ok" or "wrong".
        reasons: why it is wrong, one line each, the first place first.
        notes: what a reader should know whatever the outcome.
        max_abs_diff, relative_diff: of the end-to-end logits; infinite when they can't be compared.
        tolerance: for `relative_diff`.
        kl, kl_max: Kullback-Leibler divergence of the end-to-end logits a token, nats: mean, worst.
        top1_agreement: fraction of tokens with the same greedy choice; ties that rounding decides count as the same.
        ties: how many of those there were.
        divergence: the first place that is too far off.
        blocks_compared: visits of blocks whose outputs were compared, by block.
        logits_digest, tokens_digest: of the end-to-end logits' bits, and of their greedy tokens.
        prompt_digest: what was run.
        ranks_agree: all ranks choose the same greedy tokens; None for one rank's own report.
        ranks_bit_equal: all ranks have the same logits bit by bit; None likewise.
    """

    outcome: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    max_abs_diff: float
    relative_diff: float
    tolerance: float
    kl: float
    kl_max: float
    top1_agreement: float
    ties: int
    divergence: Divergence | None
    blocks_compared: dict[str, int]
    logits_digest: str
    tokens_digest: str
    prompt_digest: str
    ranks_agree: bool | None = None
    ranks_bit_equal: bool | None = None

    def __post_init__(self) -> None:
        if self.outcome not in ("ok", "wrong"):
            raise ValueError(f"an equivalence is ok or wrong, not {self.outcome!r}")
        if (self.outcome == "wrong") != bool(self.reasons):
            raise ValueError("a wrong model needs reasons, and one with reasons is wrong")

    @property
    def first_divergence(self) -> dict[str, Any] | None:
        """Layer and module of the first place that differs."""
        return None if self.divergence is None else self.divergence.place()

    def to_json(self) -> dict[str, Any]:
        """Plain data; infinities, which JSON lacks, become None. `from_json` reads it back."""
        data: dict[str, Any] = _finite(asdict(self))
        data["first_divergence"] = self.first_divergence
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        """What `to_json` wrote, say on another rank."""
        fields = {k: v for k, v in data.items() if k != "first_divergence"}
        for key in ("max_abs_diff", "relative_diff", "kl", "kl_max"):
            fields[key] = math.inf if fields[key] is None else fields[key]
        fields["reasons"], fields["notes"] = tuple(fields["reasons"]), tuple(fields["notes"])
        if fields["divergence"] is not None:
            d = dict(fields["divergence"])
            d["distance"] = Distance(**{k: _infinite(k, v) for k, v in d["distance"].items()})
            d["tolerance"] = Tolerance(**d["tolerance"])
            fields["divergence"] = Divergence(**d)
        return cls(**fields)


def verify(model: nn.Module, reference: Reference) -> Report:
    """Hold a split model, this rank's part of it, against the reference. Every rank must call this at the same time."""
    prompt_passes = len(reference.logits) - reference.teacher.shape[1]
    forcer = Forcer(reference.records, watch=reference.jumps)
    forced_calls = {v.call for v in reference.records}
    heads: list[tuple[int, Distance]] = []
    ends: list[mx.array] = []

    def see_head(call: int, logits: mx.array) -> None:
        if call in forced_calls:
            heads.append((call, distance(kept_rows(logits, reference, call), reference.logits[call])))

    def see_end(call: int, logits: mx.array) -> None:
        ends.append(kept_rows(logits, reference, call).astype(mx.float32))

    if reference.records:
        run_passes(model, reference.prompt, reference.teacher, reference.prefill_step, see_head, forcer)
    run_passes(model, reference.prompt, reference.teacher, reference.prefill_step, see_end)

    tolerance = reference.tolerances["logits"]
    comparison = compare_ends(ends, reference)
    compared = [d for d in forcer.distances if d.what == "output"]
    jumped = _jumped(compared, reference)
    wrong = [
        _diverged(d, reference)
        for d in forcer.distances
        if _beyond(d, reference) and not (d.what == "output" and d.visit.block in jumped)
    ]
    # A block that isn't compared (its input is cut differently) passes its own output on: what follows is off, too,
    # and what comes after the blocks can't be told apart from it.
    if not forcer.unlike:
        last = max((r.order for r in reference.records.values()), default=0)
        head = reference.tolerances["head"]
        wrong += [
            Divergence(None, "head", "logits", call, last + 1 + call, d, head)
            for call, d in heads
            if d.exceeds(head)
        ]
    wrong.sort(key=lambda d: (d.call, d.order, d.what != "input"))
    reasons = [d.describe(prompt_passes) for d in wrong[:1]]
    places = list(dict.fromkeys(str(d.place()["module"]) + _layer(d) for d in wrong))
    if len(places) > 1:
        reasons.append(
            f"{len(places)} places differ: {', '.join(places[:6])}{' ...' if len(places) > 6 else ''}"
        )
    first = wrong[0] if wrong else None
    if comparison.distance.exceeds(tolerance):
        call = next((c for c, e in enumerate(ends) if distance(e, reference.logits[c]).exceeds(tolerance)), 0)
        end = Divergence(None, "end to end", "logits", call, 0, comparison.distance, tolerance)
        reasons.append(end.describe(prompt_passes))
        first = first or end
    if comparison.top1_agreement < 1 and not reasons:
        reasons.append(
            "greedy tokens differ where the reference is certain"
        )  # cannot happen within the tolerance
    return Report(
        outcome="wrong" if reasons else "ok",
        reasons=tuple(reasons),
        notes=(*reference.notes, *_notes(forcer, reference, compared, comparison, jumped)),
        max_abs_diff=comparison.distance.max_abs,
        relative_diff=comparison.distance.relative,
        tolerance=tolerance.relative,
        kl=comparison.kl_mean,
        kl_max=comparison.kl_max,
        top1_agreement=comparison.top1_agreement,
        ties=comparison.ties,
        divergence=first,
        blocks_compared=_count(compared),
        logits_digest=digest_arrays([np.array(e) for e in ends]),
        tokens_digest=digest_arrays([np.array(mx.argmax(e, axis=-1)) for e in ends if e.size]),
        prompt_digest=reference.prompt_digest,
    )


def merge(reports: Sequence[Report], blocks: Sequence[str] = ()) -> Report:
    """All ranks' reports as one: wrong if any rank is, or if the ranks don't choose the same tokens.

    Args:
        reports: one a rank, in the order of ranks.
        blocks: names of the blocks that the reference recorded (`str(block)`); those that no rank compared are noted.

    Raises:
        ValueError: no reports, or reports of different prompts.
    """
    if not reports:
        raise ValueError("no rank reported")
    if len({r.prompt_digest for r in reports}) != 1:
        raise ValueError(
            "the ranks didn't run the same prompt: " + ", ".join(r.prompt_digest[:8] for r in reports)
        )
    several = len(reports) > 1
    reasons: list[str] = []
    for rank, report in enumerate(reports):
        same = [i for i, other in enumerate(reports) if other.reasons == report.reasons]
        if report.reasons and same[0] == rank:
            who = "" if len(same) == len(reports) else f"rank {', '.join(map(str, same))}: "
            reasons += [who + reason for reason in report.reasons]
    agree = len({r.tokens_digest for r in reports}) == 1
    equal = len({r.logits_digest for r in reports}) == 1
    if not agree:
        reasons.append("the ranks choose different tokens from the same prompt")
    notes = list(dict.fromkeys(n for r in reports for n in r.notes))
    if agree and not equal:
        notes.append("the ranks' logits differ in their last bits: sampling could part them")
    compared: dict[str, int] = {}
    for report in reports:
        for block, count in report.blocks_compared.items():
            compared[block] = max(count, compared.get(block, 0))
    missing = [b for b in blocks if b not in compared]
    if missing:
        notes.append(
            f"{len(missing)} of {len(blocks)} blocks could not be compared one by one ({', '.join(missing[:4])}"
            f"{' ...' if len(missing) > 4 else ''}): there only the end-to-end logits decide"
        )
    divergences = [r.divergence for r in reports if r.divergence is not None]
    # A place in a block says more than the end: only when no rank has one, the end is the place.
    divergences.sort(key=lambda d: (d.module in ENDS, d.call, d.order, d.what != "input"))
    worst = max(reports, key=lambda r: r.relative_diff)
    return replace(
        worst,
        outcome="wrong" if reasons else "ok",
        reasons=tuple(reasons),
        notes=tuple(notes),
        max_abs_diff=max(r.max_abs_diff for r in reports),
        kl=max(r.kl for r in reports),
        kl_max=max(r.kl_max for r in reports),
        top1_agreement=min(r.top1_agreement for r in reports),
        ties=max(r.ties for r in reports),
        divergence=divergences[0] if divergences else None,
        blocks_compared=compared,
        logits_digest=reports[0].logits_digest,
        tokens_digest=reports[0].tokens_digest,
        ranks_agree=agree if several else True,
        ranks_bit_equal=equal if several else True,
    )


def kept_rows(logits: mx.array, reference: Reference, call: int) -> mx.array:
    """The rows of a pass that the reference kept. Other shapes are left as they are, to be found different."""
    positions = reference.positions[call]
    if logits.ndim != 3 or logits.shape[1] <= max(positions):
        return logits
    return logits[:, mx.array(positions)]


def compare_ends(ends: Sequence[mx.array], reference: Reference) -> LogitsComparison:
    """All passes' logits, as `kept_rows` gives them, in one comparison."""
    tolerance = reference.tolerances["logits"]
    for end, ref in zip(ends, reference.logits, strict=True):
        if end.shape != ref.shape:
            return compare_logits(end, ref, tolerance.relative)
    # By sequence, so that consecutive rows are consecutive tokens.
    a, b = mx.concatenate(list(ends), axis=1), mx.concatenate(list(reference.logits), axis=1)
    return compare_logits(a, b, tolerance.relative)


def _beyond(d: BlockDistance, reference: Reference) -> bool:
    return d.distance.exceeds(reference.tolerance(d.visit.block, d.what))


def _jumped(outputs: Sequence[BlockDistance], reference: Reference) -> dict[Block, int]:
    """Blocks beyond their tolerance at no more rows, and by no more, than the reference's own jumps; and how many."""
    found: dict[Block, int] = {}
    for block, jumps in reference.jumps.items():
        tolerance = reference.tolerance(block, "output")
        mine = [d for d in outputs if d.visit.block == block]
        if not any(_beyond(d, reference) for d in mine) or any(d.rows is None for d in mine):
            continue
        rows = [d.rows for d in mine if d.rows is not None]
        beyond = np.concatenate([r[r[:, 2] > tolerance.row_relative, 2] for r in rows])
        rest = max(largest_smooth(r, tolerance.row_relative)[0] for r in rows)
        if len(beyond) <= jumps.rows and beyond.max(initial=0) <= jumps.limit and rest <= tolerance.relative:
            found[block] = len(beyond)
    return found


def _diverged(d: BlockDistance, reference: Reference) -> Divergence:
    block = d.visit.block
    return Divergence(
        block.layer,
        block.module,
        d.what,
        d.visit.call,
        d.order,
        d.distance,
        reference.tolerance(block, d.what),
    )


def _layer(d: Divergence) -> str:
    return "" if d.layer is None else f" of layer {d.layer}"


def _count(distances: Sequence[BlockDistance]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for d in distances:
        counts[str(d.visit.block)] = counts.get(str(d.visit.block), 0) + 1
    return counts


def _notes(
    forcer: Forcer,
    reference: Reference,
    compared: Sequence[BlockDistance],
    comparison: LogitsComparison,
    jumped: Mapping[Block, int],
) -> list[str]:
    notes = [f"{block} {why}: not compared by itself" for block, why in list(forcer.unlike.items())[:4]]
    if reference.records and not compared:
        notes.append(
            "no block of the split model is where the whole model has one: only the logits were compared"
        )
    if jumped:
        places = ", ".join(f"{n} in {block}" for block, n in list(jumped.items())[:4])
        notes.append(f"rows that jump, as the whole model's do under one rounding (ties): {places}")
    if comparison.saturated and not comparison.reference_saturated:
        notes.append("the split model's logits have next to no entropy, the whole model's have")
    if comparison.ties:
        notes.append(f"{comparison.ties} greedy tokens differ where rounding decides")
    return notes


def digest_arrays(arrays: Sequence[np.ndarray[Any, Any]], before: str = "") -> str:
    """A short name for exactly these bits, and for what another digest named before."""
    sha = hashlib.sha256(before.encode())
    for array in arrays:
        sha.update(repr((array.shape, array.dtype.str)).encode() + array.tobytes())
    return sha.hexdigest()[:32]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _infinite(name: str, value: Any) -> Any:
    return math.inf if value is None and name != "problem" else value
