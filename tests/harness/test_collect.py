"""Records from events: made-up ranks that agree, disagree, fall silent, or end in the middle."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from harness.collect import Collector
from harness.equivalence import Report
from harness.request import Case
from harness.runs import clean_record
from sharding import rows, strategies
from sharding.source import Source
from tests.harness.shell import LLAMA

SOURCE = Source("small", LLAMA, None, 0, "float32")
STEP = ({"all_sum": 4}, 1024)
FINE = Report(
    outcome="ok",
    reasons=(),
    notes=(),
    max_abs_diff=1e-6,
    relative_diff=1e-6,
    tolerance=1e-5,
    kl=1e-12,
    kl_max=1e-12,
    top1_agreement=1.0,
    ties=0,
    divergence=None,
    blocks_compared={"layer 0 self_attn": 3},
    logits_digest="l",
    tokens_digest="t",
    prompt_digest="p",
)
OFF = dataclasses.replace(
    FINE, outcome="wrong", reasons=("end to end in the prompt: off by 0.5",), relative_diff=0.5
)


def case(strategy: str, batch: int = 1, context: int = 8) -> Case:
    """A case of two ranks."""
    return Case(f"{strategy} B={batch} C={context}", 0, strategy, 2, "mpi", batch, context, "ok")


class Job:
    """A collector, and the events of its ranks."""

    def __init__(self, cases: Sequence[Case], ranks: int = 2, **fields: Any) -> None:
        self.records: list[dict[str, Any]] = []
        fields = {"planned": {"tensor": [STEP] * ranks, "upstream": [STEP] * ranks}, "rows": {}, **fields}
        self.ranks = ranks
        self.collector = Collector(SOURCE, ranks, cases, close=self.records.append, **fields)

    def say(self, kind: str, ranks: Iterable[int] | None = None, **fields: Any) -> None:
        """The same event from several ranks, all by default, as JSON would bring it."""
        for rank in self.each(ranks):
            self.collector.event(json.loads(json.dumps({"rank": rank, "event": kind, **fields})))

    def each(self, ranks: Iterable[int] | None) -> Iterable[int]:
        return range(self.ranks) if ranks is None else ranks

    def begin(self, phase: str, *names: str, shape: Sequence[int] | None = None, ranks: Any = None) -> None:
        self.say("begin", ranks, phase=phase, strategies=list(names), shape=shape)

    def check(
        self,
        strategy: str,
        report: Report = FINE,
        ranks: Iterable[int] | None = None,
        counted: dict[str, int] | None = None,
        payload: int = 1024,
    ) -> None:
        self.say(
            "checked",
            ranks,
            strategy=strategy,
            report=report.to_json(),
            counted={"all_sum": 4} if counted is None else counted,
            payload=payload,
        )

    def time(
        self, strategy: str, shape: Sequence[int] = (1, 8), ranks: Iterable[int] | None = None, **changes: Any
    ) -> None:
        if (strategy, *shape) not in self.collector._shape_reports:
            self.say("shape_checked", strategy=strategy, shape=list(shape), report=FINE.to_json())
        fields = {
            "decode": [0.010, 0.011, 0.012, 0.013, 0.014, 0.015, 0.016],
            "warmup": [0.5],
            "prefill": [0.2, 0.3, 0.4],
            "prefill_warmup": [0.9],
            "tokens_per_second": 77.0,
            "tokens_digest": ["same"],
            "interleaving": "burst",
            "launcher": {"cpu_seconds": 0.0, "stopped": False},
            **changes,
        }
        self.say("timed", ranks, strategy=strategy, shape=list(shape), **fields)

    def outcomes(self) -> dict[str, str]:
        """Of each recorded case; each record must be one that a run can keep."""
        for record in self.records:
            clean_record(record)
        return {record["case"]: record["outcome"] for record in self.records}


def test_a_case_is_recorded_when_the_last_rank_has_spoken() -> None:
    """Times, medians of each rank, the check and the plan's figures stand in one record; nothing stays open."""
    job = Job([case("tensor")])
    job.begin("load", "tensor")
    for rank in (0, 1):
        job.say(
            "loaded", [rank], strategy="tensor", seconds=rank, peak_bytes=5, active_bytes=4, shared_bytes=0
        )
    job.check("tensor")
    job.say("shape_checked", strategy="tensor", shape=[1, 8], report=FINE.to_json())
    job.begin("time", "tensor", shape=[1, 8])
    job.time("tensor", ranks=[1], decode=[0.02] * 7)
    assert job.records == []
    job.time("tensor", ranks=[0])
    assert job.outcomes() == {"tensor B=1 C=8": "ok"}
    (record,) = job.records
    assert record["seconds_per_step"] == 0.013
    lower, upper = record["seconds_per_step_interval"]
    assert lower <= 0.013 <= upper
    assert record["ranks_median"] == [0.013, 0.02]
    assert record["prefill_seconds"] == 0.3
    assert record["decode_tokens_per_second"] == 77.0
    assert record["samples"]["warmup"] == [0.5]
    assert len(record["samples"]["decode"]) == 7
    assert record["collectives_counted"] == {"all_sum": 4}
    assert record["equivalence"]["collectives_planned"] == {"all_sum": 4}
    assert record["equivalence"]["at_shape"]["outcome"] == "ok"
    assert record["load"]["seconds"] == [0, 1]
    job.collector.end("ok", "")
    assert len(job.records) == 1


def test_a_record_carries_what_was_planned() -> None:
    """The plan's row of the case, field by field."""
    tensor = strategies.resolve("tensor", "llama")
    row = rows.make_rows(SOURCE, [tensor], [2], [1], [8])[0]
    one = case("tensor")
    job = Job([one], rows={one.id: row})
    job.check("tensor")
    job.time("tensor")
    (record,) = job.records
    planned = row.to_json()
    for name in ("family", "parameters", "collectives_per_token", "bytes_per_token", "weight_bytes_per_rank"):
        assert record[name] == planned[name]


@pytest.mark.parametrize(
    "check",
    [
        lambda job: job.check("tensor", OFF),
        lambda job: [job.check("tensor", ranks=[0]), job.check("tensor", OFF, ranks=[1])],
        lambda job: [
            job.check("tensor", ranks=[0]),
            job.check("tensor", dataclasses.replace(FINE, tokens_digest="other"), ranks=[1]),
        ],
        lambda job: job.check("tensor", counted={"all_sum": 5}),
        lambda job: [job.check("tensor", ranks=[0]), job.check("tensor", ranks=[1], counted={"all_sum": 5})],
        lambda job: job.check("tensor", payload=2048),
        lambda job: [job.check("tensor", ranks=[0]), job.check("tensor", ranks=[1], payload=2048)],
    ],
    ids=["all", "one rank", "tokens", "count", "one count", "bytes", "one rank's bytes"],
)
def test_whatever_differs_makes_all_cases_of_the_strategy_wrong(check: Callable[[Job], Any]) -> None:
    """Outputs, ranks among themselves, or collectives: wrong with reasons, without times, whatever comes later."""
    job = Job([case("tensor"), case("tensor", batch=4), case("upstream")])
    check(job)
    assert job.outcomes() == {"tensor B=1 C=8": "wrong", "tensor B=4 C=8": "wrong"}
    job.time("tensor")
    job.time("tensor", shape=(4, 8))
    assert len(job.records) == 2
    for record in job.records:
        assert record["reasons"]
        assert record.get("seconds_per_step") is None
        assert record["equivalence"]["outcome"] == "wrong"
    assert list(job.collector.open) == ["upstream B=1 C=8"]


def test_infinite_distances_survive() -> None:
    """A model of NaNs is wrong, and its record is one that JSON can hold."""
    job = Job([case("tensor")])
    inf = float("inf")
    job.check("tensor", dataclasses.replace(OFF, max_abs_diff=inf, relative_diff=inf, kl=inf, kl_max=inf))
    assert job.outcomes() == {"tensor B=1 C=8": "wrong"}
    json.dumps(clean_record(job.records[0]), allow_nan=False)


def test_without_a_plan_there_is_nothing_to_hold_the_count_against() -> None:
    """Collectives of a strategy that has no plan are recorded, and accuse nobody."""
    job = Job([case("mine:split")])
    job.check("mine:split", counted={"all_gather": 1}, payload=7)
    job.time("mine:split")
    (record,) = job.records
    assert record["outcome"] == "ok"
    assert record["collectives_counted"] == {"all_gather": 1}
    assert record["equivalence"]["collectives_planned"] is None


def test_a_shape_may_be_wrong_alone() -> None:
    """What differs at one batch only is wrong there, with the place; the other case is timed."""
    job = Job([case("tensor"), case("tensor", batch=4)])
    job.check("tensor")
    for batch, report in ((1, FINE), (4, OFF)):
        job.say("shape_checked", strategy="tensor", shape=[batch, 8], report=report.to_json())
    job.time("tensor")
    job.time("tensor", shape=(4, 8))
    assert job.outcomes() == {"tensor B=4 C=8": "wrong", "tensor B=1 C=8": "ok"}
    assert job.records[0]["reasons"][0].startswith("at batch 4, context 8: ")


def test_different_tokens_while_timed_are_wrong() -> None:
    """Ranks that part while they are timed have no time."""
    job = Job([case("tensor")])
    job.check("tensor")
    job.time("tensor", ranks=[0])
    job.time("tensor", ranks=[1], tokens_digest=["other"])
    assert job.outcomes() == {"tensor B=1 C=8": "wrong"}
    assert job.records[0].get("seconds_per_step") is None


def test_a_rank_that_failed_is_believed_over_those_that_were_told() -> None:
    """The reason is that of the rank where it happened, whichever event comes first, and it is recorded once."""
    told = {"strategy": "tensor", "outcome": "crashed", "reason": "tensor failed on another rank"}
    own = {"strategy": "tensor", "outcome": "crashed", "reason": "tensor raised RuntimeError: no"}
    for order in ([(0, told), (1, own)], [(1, own), (0, told)]):
        job = Job([case("tensor"), case("upstream")])
        for rank, fields in order:
            job.say("failed", [rank], **fields)
        assert job.outcomes() == {"tensor B=1 C=8": "crashed"}
        assert job.records[0]["reasons"] == ["tensor raised RuntimeError: no"]


def test_a_refused_strategy_is_infeasible() -> None:
    """What the ranks themselves refuse is no crash."""
    job = Job([case("upstream")])
    job.say("failed", strategy="upstream", outcome="infeasible", reason="has no shard()")
    assert job.outcomes() == {"upstream B=1 C=8": "infeasible"}


@pytest.mark.parametrize("outcome", ["crashed", "hung"])
def test_a_job_that_dies_accuses_what_it_was_doing(outcome: str) -> None:
    """The strategy being loaded or checked gets the outcome, at all its shapes; the others stay open."""
    job = Job([case("upstream"), case("tensor"), case("tensor", batch=4)])
    job.begin("load", "upstream")
    job.check("upstream")
    job.begin("load", "tensor")
    job.collector.end(outcome, "rank 1 was killed")
    assert job.outcomes() == {"tensor B=1 C=8": outcome, "tensor B=4 C=8": outcome}
    assert job.records[0]["reasons"] == ["rank 1 was killed"]
    assert list(job.collector.open) == ["upstream B=1 C=8"]
    assert job.collector.suspects == set()


def test_a_job_that_dies_timing_one_shape_accuses_that_one() -> None:
    """With one strategy left there is no doubt; other shapes stay open."""
    job = Job([case("tensor"), case("tensor", batch=4)])
    job.check("tensor")
    job.begin("time", "tensor", shape=[4, 8])
    job.collector.end("crashed", "rank 1 was killed")
    assert job.outcomes() == {"tensor B=4 C=8": "crashed"}
    assert list(job.collector.open) == ["tensor B=1 C=8"]


def test_a_job_that_dies_while_strategies_take_turns_accuses_none() -> None:
    """One of them it was: they are suspects, each to be tried alone, and nothing is recorded."""
    job = Job([case("tensor"), case("upstream"), case("tensor", batch=4)])
    job.begin("time", "tensor", "upstream", shape=[1, 8])
    job.collector.end("crashed", "rank 1 was killed")
    assert job.records == []
    assert job.collector.suspects == {"tensor B=1 C=8", "upstream B=1 C=8"}
    assert len(job.collector.open) == 3


def test_a_job_that_dies_over_a_settled_case_accuses_no_other() -> None:
    """A rank that failed may take its peers down: its case is settled already, and the others had no part in it."""
    job = Job([case("tensor"), case("upstream")])
    job.begin("check", "tensor")
    job.say("failed", [1], strategy="tensor", outcome="crashed", reason="tensor's model raised ValueError: x")
    job.collector.end("crashed", "rank 1 exited with status 15")
    assert job.outcomes() == {"tensor B=1 C=8": "crashed"}
    assert list(job.collector.open) == ["upstream B=1 C=8"]


@pytest.mark.parametrize("outcome", ["crashed", "hung", "unreachable"])
def test_a_job_that_dies_before_it_began_is_every_cases_end(outcome: str) -> None:
    """Ranks that never got to a strategy will not do so next time: all cases end, so that the sweep does."""
    job = Job([case("tensor"), case("upstream")])
    job.say("rank", [0], view={"rank": 0})
    job.collector.end(outcome, "the ranks that answered are not 2 ranks of one job")
    assert job.outcomes() == {"tensor B=1 C=8": outcome, "upstream B=1 C=8": outcome}
    assert job.collector.open == {}


@pytest.mark.parametrize("missing", ["checked", "timed"])
def test_a_job_that_ends_well_without_a_rank_is_a_fault(missing: str) -> None:
    """A case of which one rank said nothing is not ok: it is recorded as crashed, never left out."""
    job = Job([case("tensor")])
    job.begin("load", "tensor")
    job.check("tensor", ranks=[0] if missing == "checked" else None)
    if missing == "timed":
        job.time("tensor", ranks=[0])
    job.collector.end("ok", "2 of 2 ranks ended at status 0")
    assert job.outcomes() == {"tensor B=1 C=8": "crashed"}
    assert "without a result" in job.records[0]["reasons"][0]


def test_a_rank_that_repeats_itself_is_still_one_rank() -> None:
    """Two parts of one rank don't stand for two ranks."""
    job = Job([case("tensor")])
    job.check("tensor", ranks=[0])
    job.check("tensor", ranks=[0])
    job.time("tensor", ranks=[0, 0])
    assert job.records == []
    assert job.collector.checks == {}


def test_without_measuring_a_right_case_ends_with_its_check() -> None:
    """`verify`: ok when the job has ended well; one that was not checked by all is a fault."""
    job = Job([case("tensor"), case("upstream")], measure=False)
    job.check("tensor")
    job.check("upstream", ranks=[1])
    assert job.records == []
    job.collector.end("ok", "")
    assert job.outcomes() == {"tensor B=1 C=8": "ok", "upstream B=1 C=8": "crashed"}


def test_what_is_no_event_of_ours_is_left_alone() -> None:
    """Later versions may say more."""
    job = Job([case("tensor")])
    job.say("something new", colour="blue")
    job.say("progress", steps=4)
    assert job.records == []
    assert list(job.collector.open) == ["tensor B=1 C=8"]


def test_what_was_never_checked_has_no_time() -> None:
    """Times without a passed check, at the strategy or at the shape, are a fault of ours and never a result."""
    job = Job([case("tensor")])
    job.time("tensor")
    assert job.outcomes() == {"tensor B=1 C=8": "crashed"}
    assert job.records[0]["seconds_per_step"] is None


def test_a_failure_at_one_shape_is_that_cases_alone() -> None:
    """An exception at one batch leaves the other one to be timed."""
    job = Job([case("tensor"), case("tensor", batch=4)])
    job.check("tensor")
    job.say("failed", [0], strategy="tensor", shape=[4, 8], outcome="crashed", reason="out of memory")
    job.time("tensor")
    assert job.outcomes() == {"tensor B=4 C=8": "crashed", "tensor B=1 C=8": "ok"}


def test_ranks_may_be_planned_to_differ() -> None:
    """A pipeline's ranks send and receive differently: each is held against its own plan."""
    sends, receives = ({"send": 1}, 8), ({"recv_like": 1}, 8)
    job = Job([case("tensor")], planned={"tensor": [sends, receives]})
    job.check("tensor", ranks=[0], counted={"send": 1}, payload=8)
    job.check("tensor", ranks=[1], counted={"recv_like": 1}, payload=8)
    job.time("tensor")
    assert job.outcomes() == {"tensor B=1 C=8": "ok"}
