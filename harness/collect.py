"""From the events of N ranks to records: one for each case, as soon as all ranks have said their part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from harness import equivalence, statistics
from harness.equivalence import Report
from harness.request import Case
from harness.runs import SCHEMA, TIMINGS
from sharding.families.registry import family_of
from sharding.rows import Row
from sharding.source import Source

PLANNED = (
    "parameters",
    "collectives_per_token",
    "bytes_per_token",
    "weight_bytes_per_rank",
    "replicated_weight_bytes_per_rank",
    "weight_bytes_read_per_token",
    "cache_bytes_per_rank",
    "fits",
)
"""Fields of a plan's row that a record carries on."""


OF_ANOTHER = "failed on another rank"
"""How a rank says that it stopped because of another one."""


def now() -> str:
    """This moment, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def base_record(case: Case, source: Source, row: Row | None, started: str) -> dict[str, Any]:
    """What a record of any outcome says of its case."""
    planned = row.to_json() if row is not None else {}
    family = family_of(source.model_type)
    return {
        "schema": SCHEMA,
        "case": case.id,
        "model": source.label,
        "model_type": source.model_type,
        "family": planned.get("family") or (family.name if family else "no table"),
        "strategy": case.strategy,
        "ranks": case.ranks,
        "backend": case.backend,
        "batch": case.batch,
        "context": case.context,
        "dtype": source.dtype,
        "quantization": source.quantization,
        "cuts": list(source.cuts),
        "notes": list(source.notes),
        "expect": case.expect,
        **{name: planned.get(name) for name in PLANNED},
        **dict.fromkeys(TIMINGS),
        "started": started,
        "ended": now(),
    }


@dataclass
class Checked:
    """One strategy's check, as all ranks together found it."""

    report: Report
    counted: dict[str, int]
    payload: int
    reasons: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether the strategy may be timed."""
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        """The `equivalence` field of a record."""
        report = self.report.to_json()
        keep = ("max_abs_diff", "relative_diff", "tolerance", "kl", "kl_max", "top1_agreement", "ranks_agree")
        return {
            "outcome": "ok" if self.right else "wrong",
            **{name: report[name] for name in keep},
            "ranks_bit_equal": report["ranks_bit_equal"],
            "collectives_counted": self.counted,
            "collectives_planned": None,
            "first_divergence": report["first_divergence"],
            "blocks_compared": len(report["blocks_compared"]),
            "notes": list(self.report.notes),
        }


@dataclass
class Collector:
    """Listens to one job and closes its cases.

    Attributes:
        cases: Those that the job is to settle.
        rows: The plan's row of each case id, where there is one.
        planned: Strategy to each rank's collectives and bytes of one decode step at batch 1; missing where
            nothing is planned.
        close: Called with each finished record.
        measure: False when a case ends with its check and is not timed.
        blocks: Names of the blocks that the reference recorded.
        log: Where the job's logs will lie, relative to the run's folder.
        open: Cases without a record, by id.
        suspects: Of the open ones, ids of those of which one must have ended the job.
    """

    source: Source
    ranks: int
    cases: Sequence[Case]
    rows: Mapping[str, Row]
    planned: Mapping[str, Sequence[tuple[dict[str, int], int]]]
    close: Callable[[dict[str, Any]], None]
    measure: bool = True
    blocks: Sequence[str] = ()
    log: str = "logs"
    open: dict[str, Case] = field(init=False)
    checks: dict[str, Checked] = field(default_factory=dict)
    views: dict[int, dict[str, Any]] = field(default_factory=dict)
    doing: dict[str, Any] | None = None
    suspects: set[str] = field(default_factory=set)
    _parts: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = field(default_factory=dict)
    _shape_reports: dict[tuple[Any, ...], Report] = field(default_factory=dict)
    _loads: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    _spreads: dict[str, dict[str, float]] = field(default_factory=dict)
    _started: str = field(default_factory=now)

    def __post_init__(self) -> None:
        self.open = {case.id: case for case in self.cases}

    def event(self, event: Mapping[str, Any]) -> None:
        """Take one event of one rank."""
        kind, rank = event.get("event"), int(event["rank"])
        if kind == "rank":
            self.views[rank] = dict(event["view"])
        elif kind == "begin":
            if self.doing is None or event != {**self.doing, "rank": rank}:
                self.doing = dict(event)
        elif kind == "loaded":
            self._loads.setdefault(event["strategy"], {})[rank] = dict(event)
        elif kind == "failed":
            self._fail(event["strategy"], event.get("shape"), event["outcome"], event["reason"])
        elif kind == "spread_checked" and rank == 0:
            self._spreads[event["strategy"]] = {"rms": event["rms"], "kl": event["kl"]}
        elif kind == "checked" and (parts := self._all((kind, event["strategy"]), event)):
            self._checked(event["strategy"], parts)
        elif kind == "shape_checked" and (
            parts := self._all((kind, event["strategy"], *event["shape"]), event)
        ):
            self._shape_checked(event["strategy"], event["shape"], parts)
        elif kind == "timed" and (parts := self._all((kind, event["strategy"], *event["shape"]), event)):
            self._timed(event["strategy"], event["shape"], parts)

    def end(self, outcome: str, reason: str) -> None:
        """The job ended: settle what it was doing, and leave the rest open unless nothing else can be done.

        A job that ended well leaves nothing open; what it left is a fault and is recorded as such. One that died over
        a case that is settled already (a rank failed, its peers could not go on) accuses no other case. One that died
        while several strategies took turns makes them `suspects`, which stay open.
        """
        if not self.open:
            return
        if outcome == "ok" and not self.measure:
            for case in [case for case in self.open.values() if case.strategy in self.checks]:
                self._close(case, "ok", ())
        if outcome == "ok":
            outcome, reason = "crashed", "the ranks ended without a result for this case"
            guilty = list(self.open.values())
        else:
            guilty = self._guilty()
            if len(guilty) > 1 and (self.doing or {}).get("phase") == "time" and outcome != "unreachable":
                self.suspects = {case.id for case in guilty}
                return
            if not guilty and len(self.open) == len(self.cases):
                guilty = list(self.open.values())
        for case in guilty:
            self._close(case, outcome, (reason,))

    def _guilty(self) -> list[Case]:
        """Open cases that the ranks were working at."""
        doing = self.doing or {}
        shape = doing.get("shape")
        return [
            case
            for case in self.open.values()
            if case.strategy in doing.get("strategies", ())
            and (not shape or [case.batch, case.context] == shape)
        ]

    def _all(self, key: tuple[Any, ...], event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All ranks' parts in rank order, once the last one is there."""
        parts = self._parts.setdefault(key, {})
        parts[int(event["rank"])] = dict(event)
        return [parts[rank] for rank in range(self.ranks)] if len(parts) == self.ranks else []

    def _of(self, strategy: str) -> list[Case]:
        return [case for case in self.open.values() if case.strategy == strategy]

    def _fail(self, strategy: str, shape: list[int] | None, outcome: str, reason: str) -> None:
        if OF_ANOTHER in reason:
            return  # the rank where it happened says more than those that were told of it
        for case in self._of(strategy):
            if shape is None or [case.batch, case.context] == shape:
                self._close(case, outcome, (reason,))

    def _checked(self, strategy: str, parts: list[dict[str, Any]]) -> None:
        report = equivalence.merge([Report.from_json(part["report"]) for part in parts], self.blocks)
        busiest = max(parts, key=lambda part: int(part["payload"]))
        counted, payload = busiest["counted"], int(busiest["payload"])
        reasons = list(report.reasons)
        planned = self.planned.get(strategy)
        for rank, part in enumerate(parts):
            found = (part["counted"], int(part["payload"]))
            if planned is not None and found != tuple(planned[rank]):
                reasons.append(
                    f"rank {rank}: a decode step asked for {found[0]} with {found[1]} bytes at batch 1, planned were "
                    f"{planned[rank][0]} with {planned[rank][1]}"
                )
                break
        checked = Checked(report, counted, payload, tuple(reasons))
        self.checks[strategy] = checked
        if not checked.right:
            for case in self._of(strategy):
                self._close(case, "wrong", checked.reasons)

    def _shape_checked(self, strategy: str, shape: list[int], parts: list[dict[str, Any]]) -> None:
        report = equivalence.merge([Report.from_json(part["report"]) for part in parts])
        self._shape_reports[(strategy, *shape)] = report
        if report.outcome != "ok":
            for case in self._of(strategy):
                if [case.batch, case.context] == shape:
                    at = f"at batch {shape[0]}, context {shape[1]}: "
                    self._close(case, "wrong", tuple(at + reason for reason in report.reasons))

    def _timed(self, strategy: str, shape: list[int], parts: list[dict[str, Any]]) -> None:
        case = next((c for c in self._of(strategy) if [c.batch, c.context] == shape), None)
        if case is None:
            return
        shaped = self._shape_reports.get((strategy, *shape))
        checked = self.checks.get(strategy)
        if checked is None or not checked.right or shaped is None or shaped.outcome != "ok":
            self._close(
                case, "crashed", ("it was timed without having passed its check: a fault of shardbench",)
            )
            return
        # Every block of a strategy decodes the same prompt, and so must all ranks.
        digests = {digest for part in parts for digest in part["tokens_digest"]}
        if len(digests) > 1:
            self._close(
                case,
                "wrong",
                ("not the same tokens were decoded on all ranks and in all blocks while it was timed",),
            )
            return
        first = parts[0]
        summary = statistics.summary(first["decode"])
        prefill = statistics.summary(first["prefill"])
        self._close(
            case,
            "ok",
            (),
            seconds_per_step=summary.median,
            seconds_per_step_interval=summary.interval,
            prefill_seconds=prefill.median,
            decode_tokens_per_second=first["tokens_per_second"],
            samples={
                "decode": first["decode"],
                "warmup": first["warmup"],
                "prefill": first["prefill"],
                "prefill_warmup": first["prefill_warmup"],
            },
            ranks_median=[statistics.summary(part["decode"]).median for part in parts],
            interleaving=first["interleaving"],
            launcher=first["launcher"],
        )

    def _close(self, case: Case, outcome: str, reasons: Sequence[str], **results: Any) -> None:
        del self.open[case.id]
        record = {
            **base_record(case, self.source, self.rows.get(case.id), self._started),
            "outcome": outcome,
            "reasons": list(reasons),
            "log": self.log,
            **results,
        }
        checked = self.checks.get(case.strategy)
        if checked is not None:
            planned = self.planned.get(case.strategy)
            record["equivalence"] = {
                **checked.to_json(),
                "collectives_planned": max(planned, key=lambda step: step[1])[0] if planned else None,
            }
            if case.strategy in self._spreads:
                record["equivalence"]["timed_dtype"] = self._spreads[case.strategy]
            record["collectives_counted"] = checked.counted
        shaped = self._shape_reports.get((case.strategy, case.batch, case.context))
        if shaped is not None and "equivalence" in record:
            found = shaped.to_json()
            record["equivalence"]["at_shape"] = {
                name: found[name] for name in ("outcome", "max_abs_diff", "relative_diff", "tolerance", "kl")
            }
        loads = self._loads.get(case.strategy, {})
        if len(loads) == self.ranks:
            in_order = [loads[rank] for rank in range(self.ranks)]
            record["load"] = {
                "seconds": [part["seconds"] for part in in_order],
                "peak_bytes": [part["peak_bytes"] for part in in_order],
                "shared_bytes": [part["shared_bytes"] for part in in_order],
            }
        self.close(record)
