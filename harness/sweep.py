"""Run a sweep on one host: plan each case, take references, launch, and record every case as it ends.

One launch serves all cases of a model, world size and backend. When a job dies or hangs, what it was working
at is recorded so, and another job does the rest. If it was timing several strategies in turn, nobody can say which
of them it was: each of these gets a job of its own. Each job settles or singles out at least one case, so that this
ends.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from harness import apart, evidence, protocol
from harness.collect import Collector, base_record, now
from harness.hosts import STALE_SECONDS
from harness.launch import JobSpec, Verdict, run_job
from harness.launcher import usable_cores
from harness.place import Place, threads
from harness.request import Case, Settings
from harness.tokens import tokenize, vocabulary_of
from sharding import rows, strategies
from sharding.source import Source

WORKER = ("-m", "harness.worker")
Records = Callable[[dict[str, Any]], None]
Progress = Callable[[dict[str, Any]], None]


@dataclass
class References:
    """What the whole model does, for the ranks to be held against.

    Attributes:
        files: Name in the job folder to the local file.
        notes: What a reader should know.
        problem: Outcome and reason when the whole model gives nothing to compare with.
        spread: Distance of the unsharded model in the timed dtype, where that is not float32.
        blocks: Names of the blocks that it recorded.
        views: What the rank saw of its environment.
    """

    files: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problem: tuple[str, str] | None = None
    spread: dict[str, float] | None = None
    blocks: list[str] = field(default_factory=list)
    views: list[dict[str, Any]] = field(default_factory=list)


class Runner:
    """One sweep on one place.

    Args:
        place: Where.
        models: Sources, by the index that cases name.
        settings: How to check and measure.
        logs: Folder for the jobs' logs.
        record: Gets each finished record.
        progress: Gets events for a progress display.
        measure: False checks only.
    """

    def __init__(
        self,
        place: Place,
        models: Sequence[Source],
        settings: Settings,
        logs: Path,
        record: Records,
        progress: Progress = lambda _: None,
        *,
        measure: bool = True,
    ) -> None:
        self.place = place
        self.models = models
        self.settings = settings
        self.logs = logs
        self.record = record
        self.progress = progress
        self.measure = measure
        self.views: list[dict[str, Any]] = []

    def run(self, cases: Sequence[Case]) -> None:
        """Settle every case."""
        for index, of_model in groupby(cases, key=lambda case: case.model):
            wanted = list(of_model)
            with _scratch() as scratch:
                self._model(self.models[index], wanted, scratch)

    def _model(self, source: Source, cases: list[Case], scratch: Path) -> None:
        planned = self._plan(source, cases)
        feasible = [case for case in cases if case.id not in planned.settled]
        if feasible and (reason := self._too_large(source)):
            for case in feasible:
                self._settle(case, source, planned.rows.get(case.id), "infeasible", [reason])
            return
        if not feasible:
            return
        references = self._references(source, feasible, scratch)
        if references.problem is not None:
            outcome, reason = references.problem
            for case in feasible:
                self._settle(case, source, planned.rows.get(case.id), outcome, [reason])
            return
        for (ranks, backend), group in groupby(feasible, key=lambda case: (case.ranks, case.backend)):
            self._group(source, list(group), ranks, backend, planned, references)

    def _too_large(self, source: Source) -> str:
        """Why the whole model can't be run in float32, as it must be to be compared with; empty when it can."""
        strategy = strategies.resolve(strategies.UPSTREAM, source.model_type)
        whole = rows.make_rows(
            replace(source, dtype="float32"), [strategy], [1], [1], [1], self.place.memory
        )[0]
        return (
            f"the whole model in float32, to compare with: {whole.reasons[0]}" if whole.fits is False else ""
        )

    def _settle(
        self, case: Case, source: Source, row: rows.Row | None, outcome: str, reasons: list[str]
    ) -> None:
        record = base_record(case, source, row, now())
        self.record({**record, "outcome": outcome, "reasons": reasons})

    def _plan(self, source: Source, cases: list[Case]) -> Planned:
        """Plan every case; those that can't be are recorded as infeasible."""
        planned = Planned()
        for case in cases:
            strategy = strategies.resolve(case.strategy, source.model_type)
            memory = self.place.memory // case.ranks
            row = self._row(source, strategy, case, case.batch, memory)
            planned.rows[case.id] = row
            # Right or wrong is decided in float32 whatever is timed, so that must be possible, and is what is counted.
            checked = replace(source, dtype="float32")
            one = row
            if row.valid and (source.dtype != "float32" or case.batch != 1):
                one = self._row(checked, strategy, case, 1, memory)
            if not row.valid and strategy.users_own:
                del planned.rows[case.id]  # it may still run on real ranks; how it fails there is what counts
            elif not row.valid or row.fits is False or one.fits is False:
                planned.settled.add(case.id)
                self._settle(case, source, row, "infeasible", list(row.reasons or one.reasons))
            else:
                planned.steps[case.strategy, case.ranks] = list(
                    zip(one.collectives_per_rank, one.bytes_per_rank, strict=True)
                )
        return planned

    def _row(
        self, source: Source, strategy: strategies.Strategy, case: Case, batch: int, memory: int | None
    ) -> rows.Row:
        """The plan of a case, at a batch."""
        if not strategy.users_own or case.ranks == 1:
            return rows.make_rows(source, [strategy], [case.ranks], [batch], [case.context], memory)[0]
        seconds = min(apart.SECONDS, self.settings.stall_seconds)
        asked = (source, strategy.name, case.ranks, [batch], [case.context], memory)
        return apart.plan_apart(*asked, seconds=seconds)[0]

    def _work(self, source: Source, cases: Sequence[Case]) -> dict[str, Any]:
        shapes = sorted({(case.batch, case.context) for case in cases})
        settings = self.settings
        ids = None
        if settings.prompt is not None:
            ids = tokenize(source, settings.prompt)
        return {
            "source": source.to_json(),
            "settings": settings.model_dump(),
            "shapes": [list(shape) for shape in shapes] if self.measure else [],
            "vocabulary": vocabulary_of(source),
            "prompt_ids": ids,
            "path": list(self.place.path),
        }

    def _job(
        self,
        ranks: int,
        backend: str,
        work: Mapping[str, Any],
        files: Mapping[str, Path],
        on_event: Progress,
        *,
        alone: bool = False,
    ) -> Verdict:
        """Run one job; `alone` gives its one rank all cores, where nothing is timed."""
        spec = JobSpec(
            ranks=ranks,
            backend=backend,
            argv=WORKER,
            env={**self.place.env, **(threads(usable_cores()) if alone else {})},
            deadline_seconds=self.settings.deadline_seconds,
            stall_seconds=self.settings.stall_seconds,
            work=dict(work),
            files=dict(files),
        )
        into = self.logs / self._next_job()

        seen: Counter[int] = Counter()

        def follow(event: dict[str, Any]) -> None:
            seen[event["rank"]] += 1
            on_event(event)
            self.progress(event)

        verdict = run_job(self.place.host, spec, into, follow)
        # What a killed agent did not hand on any more would have its case taken for another's.
        for event in evidence.unseen(into, seen):
            on_event(event)
        evidence.append_logs(into)
        return verdict

    def _next_job(self) -> str:
        """The name of the next job's folder of logs."""
        taken = [int(number) for path in self.logs.glob("job-*") if (number := path.name[4:]).isdecimal()]
        return f"job-{max(taken, default=0) + 1}"

    def _references(self, source: Source, cases: list[Case], scratch: Path) -> References:
        found = References()

        def listen(event: dict[str, Any]) -> None:
            kind = event.get("event")
            if kind == "rank":
                found.views.append(event["view"])
            elif kind == "note":
                found.notes.append(event["text"])
            elif kind in ("broken", "unsupported_dtype"):
                what = (
                    "" if kind == "broken" else f"the unsharded model does not run in {source.dtype} here: "
                )
                found.problem = ("crashed", what + event["reason"])
            elif kind == "spread":
                found.spread = {name: event[name] for name in ("rms", "kl", "rows")}
                if not all(map(math.isfinite, found.spread.values())):
                    found.problem = (
                        "crashed",
                        f"the unsharded model gives no numbers in {source.dtype} here",
                    )
            elif kind == "referenced":
                found.blocks = event["blocks"]

        self.progress({"event": "reference", "model": source.label})
        work = {**self._work(source, cases), "kind": "reference"}
        verdict = self._job(1, "none", work, {}, listen, alone=True)
        self.views += found.views
        files = sorted((verdict.jobdir_copy / "rank-0").glob("*.safetensors"))
        for path in files:
            # Large, and of use only to the jobs of this run.
            found.files[path.name] = Path(shutil.move(path, scratch / path.name))
        if verdict.outcome != "ok":
            found.problem = (verdict.outcome, f"the unsharded model: {verdict.reason}")
            return found
        return found

    def _group(
        self,
        source: Source,
        cases: list[Case],
        ranks: int,
        backend: str,
        planned: Planned,
        references: References,
    ) -> None:
        waiting = [list(cases)]
        while waiting:
            remaining = waiting.pop(0)
            names = list(dict.fromkeys(case.strategy for case in remaining))
            steps = {name: planned.steps[name, ranks] for name in names if (name, ranks) in planned.steps}
            collector = Collector(
                source,
                ranks,
                remaining,
                planned.rows,
                steps,
                self._noted(references.notes),
                self.measure,
                references.blocks,
                f"{self.logs.name}/{self._next_job()}",
            )
            work = {
                **self._work(source, remaining),
                "kind": "ranks",
                "strategies": names,
                "planned": {name: [list(rank) for rank in step] for name, step in steps.items()},
                "measure": self.measure,
                "interleaving": self._interleaving(remaining, planned, ranks),
                "spread": references.spread,
            }
            self.progress({"event": "group", "model": source.label, "ranks": ranks, "backend": backend})
            verdict = self._job(ranks, backend, work, references.files, collector.event)
            self.views += [collector.views[rank] for rank in sorted(collector.views)]
            collector.end(verdict.outcome, verdict.reason)
            if verdict.outcome == "unreachable":
                unsettled = [*collector.open.values(), *(case for group in waiting for case in group)]
                for case in unsettled:
                    self._settle(case, source, planned.rows.get(case.id), "unreachable", [verdict.reason])
                return
            left = [case for case in remaining if case.id in collector.open]
            suspects = [case for case in left if case.id in collector.suspects]
            others = [case for case in left if case.id not in collector.suspects]
            waiting += [group for group in (others, *([case] for case in suspects)) if group]

    def _noted(self, notes: list[str]) -> Records:
        def record(found: dict[str, Any]) -> None:
            self.record({**found, "notes": [*found.get("notes", []), *notes]})

        return record

    def _interleaving(self, cases: Sequence[Case], planned: Planned, ranks: int) -> str:
        """In turn, a burst of steps each, when all strategies fit beside each other even if they shared no slices."""
        held: dict[str, int] = {}
        cache = 0
        for case in cases:
            row = planned.rows.get(case.id)
            if row is None:
                return "abba" if len({c.strategy for c in cases}) > 1 else "burst"
            held[case.strategy] = max(row.weight_bytes_per_rank)
            cache = max(cache, max(row.cache_bytes_per_rank, default=0))
        needed = sum(held.values()) + cache * len(held)
        return "burst" if needed <= self.place.memory // ranks else "abba"


@dataclass
class Planned:
    """The plans of one model's cases.

    Attributes:
        rows: By case id.
        settled: Case ids that the plan has settled.
        steps: (strategy, ranks) to each rank's collectives and bytes of one decode step at batch 1, in float32.
    """

    rows: dict[str, rows.Row] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    steps: dict[tuple[str, int], list[tuple[dict[str, int], int]]] = field(default_factory=dict)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A private folder for references; what a killed controller left behind goes after a day."""
    root = protocol.private_folder(Path(tempfile.gettempdir()) / f"shardbench-{os.getuid()}")
    root = protocol.private_folder(root / "references")
    for old in root.iterdir():
        if time.time() - old.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
