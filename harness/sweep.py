"""Run a sweep on one host: plan each case, take references, launch, and record every case as it ends.

One launch serves all cases of a model, world size and backend. When a job dies or hangs, what it was working
at is recorded so, and another job does the rest; each job settles at least one case, so that this ends.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from harness.collect import Collector, base_record, now
from harness.hosts import Host
from harness.launch import JobSpec, Verdict, run_job
from harness.request import Case, Settings
from sharding import rows, strategies
from sharding.source import Source

WORKER = ("-m", "harness.worker")
Records = Callable[[dict[str, Any]], None]
Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Place:
    """Where jobs run and what they may use.

    Attributes:
        host: This machine or a remote one.
        env: Environment of the ranks beyond the host's own (threads, a preloaded BLAS).
        memory: Bytes that all ranks of the host may use together.
        path: Folders that ranks add to Python's path, for users' own strategies.
    """

    host: Host
    env: Mapping[str, str]
    memory: int
    path: tuple[str, ...] = ()


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
        self._jobs = 0

    def run(self, cases: Sequence[Case]) -> None:
        """Settle every case."""
        for index, of_model in groupby(cases, key=lambda case: case.model):
            wanted = list(of_model)
            with _scratch() as scratch:
                self._model(self.models[index], wanted, scratch)

    def _model(self, source: Source, cases: list[Case], scratch: Path) -> None:
        planned = self._plan(source, cases)
        feasible = [case for case in cases if case.id not in planned.settled]
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
            args = ([strategy], [case.ranks])
            row = rows.make_rows(source, *args, [case.batch], [case.context], memory)[0]
            planned.rows[case.id] = row
            if not row.valid and strategy.users_own:
                del planned.rows[case.id]  # it may still run on real ranks; how it fails there is what counts
            elif not row.valid or row.fits is False:
                planned.settled.add(case.id)
                self._settle(case, source, row, "infeasible", list(row.reasons))
            elif (case.strategy, case.ranks) not in planned.steps:
                one = row if case.batch == 1 else rows.make_rows(source, *args, [1], [case.context])[0]
                planned.steps[case.strategy, case.ranks] = (
                    dict(one.collectives_per_token or {}),
                    int(one.bytes_per_token or 0),
                )
        return planned

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
        self, ranks: int, backend: str, work: Mapping[str, Any], files: Mapping[str, Path], on_event: Progress
    ) -> Verdict:
        self._jobs += 1
        spec = JobSpec(
            ranks=ranks,
            backend=backend,
            argv=WORKER,
            env=dict(self.place.env),
            deadline_seconds=self.settings.deadline_seconds,
            stall_seconds=self.settings.stall_seconds,
            work=dict(work),
            files=dict(files),
        )
        into = self.logs / f"job-{self._jobs}"
        while into.exists():
            self._jobs += 1
            into = self.logs / f"job-{self._jobs}"

        def follow(event: dict[str, Any]) -> None:
            on_event(event)
            self.progress(event)

        return run_job(self.place.host, spec, into, follow)

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
            elif kind == "referenced":
                found.blocks = event["blocks"]

        self.progress({"event": "reference", "model": source.label})
        work = {**self._work(source, cases), "kind": "reference"}
        verdict = self._job(1, "none", work, {}, listen)
        self.views += found.views
        if verdict.outcome != "ok":
            found.problem = (verdict.outcome, f"the unsharded model: {verdict.reason}")
            return found
        for path in sorted((verdict.jobdir_copy / "rank-0").glob("*.safetensors")):
            # Large, and of use only to the jobs of this run.
            found.files[path.name] = Path(shutil.move(path, scratch / path.name))
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
        remaining = list(cases)
        while remaining:
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
            )
            work = {
                **self._work(source, remaining),
                "kind": "ranks",
                "strategies": names,
                "planned": {name: list(step) for name, step in steps.items()},
                "measure": self.measure,
                "interleaving": self._interleaving(remaining, planned, ranks),
                "spread": references.spread,
            }
            self.progress({"event": "group", "model": source.label, "ranks": ranks, "backend": backend})
            verdict = self._job(ranks, backend, work, references.files, collector.event)
            self.views += [collector.views[rank] for rank in sorted(collector.views)]
            collector.end(verdict.outcome, verdict.reason)
            if verdict.outcome == "unreachable":
                for case in list(collector.open.values()):
                    self._settle(case, source, planned.rows.get(case.id), "unreachable", [verdict.reason])
                return
            remaining = [case for case in remaining if case.id in collector.open]

    def _noted(self, notes: list[str]) -> Records:
        def record(found: dict[str, Any]) -> None:
            self.record({**found, "notes": [*found.get("notes", []), *notes]})

        return record

    def _interleaving(self, cases: Sequence[Case], planned: Planned, ranks: int) -> str:
        """Step by step when all strategies fit beside each other; slices that are shared count once at most."""
        held: dict[str, int] = {}
        cache = 0
        for case in cases:
            row = planned.rows.get(case.id)
            if row is None:
                return "abba" if len({c.strategy for c in cases}) > 1 else "step"
            held[case.strategy] = max(row.weight_bytes_per_rank)
            cache = max(cache, max(row.cache_bytes_per_rank, default=0))
        needed = sum(held.values()) + cache * len(held)
        return "step" if needed <= self.place.memory // ranks else "abba"


@dataclass
class Planned:
    """The plans of one model's cases.

    Attributes:
        rows: By case id.
        settled: Case ids that the plan has settled.
        steps: (strategy, ranks) to collectives and bytes of one decode step at batch 1.
    """

    rows: dict[str, rows.Row] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    steps: dict[tuple[str, int], tuple[dict[str, int], int]] = field(default_factory=dict)


@contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="shardbench-references-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def vocabulary_of(source: Source) -> int:
    """Tokens that prompts are drawn from."""
    config = source.config
    nested = config.get("text_config")
    return int(config.get("vocab_size") or (nested or {}).get("vocab_size") or 0)


def tokenize(source: Source, text: str) -> list[int]:
    """Token ids of a text, through the checkpoint's own tokenizer, without special tokens.

    Raises:
        UsageError: The source has no tokenizer, or the text no tokens.
    """
    from tokenizers import Tokenizer

    from harness.errors import UsageError

    path = Path(source.folder or "") / "tokenizer.json"
    if source.folder is None or not path.is_file():
        raise UsageError(
            f"--prompt: {source.label} has no tokenizer.json; leave --prompt out for seeded random ids"
        )
    try:
        ids = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
    except Exception as error:  # The library raises bare exceptions.
        raise UsageError(f"{path}: not a usable tokenizer ({error}); fetch the checkpoint again") from None
    if not ids:
        raise UsageError(f"--prompt {text!r}: no tokens in it; give more text")
    return list(ids)


def rank_environment(preload: Mapping[str, str]) -> dict[str, str]:
    """Environment of a rank here: one BLAS thread, since ranks share the cores, and the preloaded BLAS."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1")
    kept = {
        name: os.environ[name] for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if name in os.environ
    }
    # MLX's CPU backend compiles fused functions with g++; without one they must run unfused.
    unfused = {"MLX_DISABLE_COMPILE": "1"} if sys.platform == "linux" and shutil.which("g++") is None else {}
    return {**threads, **kept, **unfused, **preload, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
