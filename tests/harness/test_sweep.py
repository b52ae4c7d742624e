"""Whole runs of tiny models on real ranks: what misbehaves is recorded as it ended, and the rest goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import sweep
from harness.errors import UsageError
from harness.hosts import LocalHost
from harness.launch import JobSpec, Verdict
from harness.place import Place
from harness.request import Case, Settings
from harness.runs import RunStore
from harness.sweep import Runner
from harness.tokens import tokenize
from sharding.source import Source
from tests.harness.shell import LLAMA, Done, lines, shardbench, workplace
from tests.harness.test_collect import FINE

STALL = "6"
RECORD_FIELDS = {
    *("schema", "case", "model", "model_type", "family", "strategy", "ranks", "backend", "batch", "context"),
    *("dtype", "quantization", "cuts", "outcome", "expect", "reasons", "collectives_per_token"),
    *("bytes_per_token", "parameters", "weight_bytes_per_rank", "replicated_weight_bytes_per_rank"),
    *("weight_bytes_read_per_token", "cache_bytes_per_rank", "fits", "started", "ended"),
}
OK_FIELDS = {
    *("seconds_per_step", "seconds_per_step_interval", "prefill_seconds", "decode_tokens_per_second"),
    *("samples", "ranks_median", "interleaving", "collectives_counted", "equivalence", "launcher"),
}
ENDS = {
    "rude:raises_computing": "crashed",
    "rude:exits_computing": "crashed",
    "rude:dies_loading": "crashed",
    "rude:raises_on_one": "crashed",
    "rude:leaves": "crashed",
    "rude:exits": "crashed",
    "rude:nonsense": "crashed",
    "rude:wrong": "wrong",
    "rude:wrong_on_one": "wrong",
    "rude:not_numbers": "wrong",
    "rude:fine": "ok",
    "tensor": "ok",
    "upstream": "ok",
}


@pytest.fixture(scope="module")
def rude_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """One run in which most strategies misbehave, each in its own way, the good ones last."""
    folder = workplace(tmp_path_factory.mktemp("rude"))
    done = shardbench(
        *("run", "llama.json", "--strategy", ",".join(ENDS), "--ranks", "2", "--steps", "8"),
        *("--context", "8", "--stall", "30", "--json"),
        cwd=folder,
    )
    return folder, done


def by_strategy(done: Done) -> dict[str, dict[str, Any]]:
    """The records of a run."""
    return {record["strategy"]: record for record in done.json["records"]}


@pytest.mark.slow
def test_every_strategy_ends_as_it_behaves(rude_run: tuple[Path, Done]) -> None:
    """A rank that raises, exits or is killed, loading or computing, costs its own case; all others get theirs."""
    _, done = rude_run
    assert done.status == 1
    assert {name: record["outcome"] for name, record in by_strategy(done).items()} == ENDS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("rude:raises_computing", "in the middle of a forward pass"),
        ("rude:exits_computing", "rank 1 exited with status 9"),
        ("rude:dies_loading", "rank 1 was killed by SIGKILL"),
        ("rude:raises_on_one", "not on this rank"),
        ("rude:leaves", "SystemExit"),
        ("rude:exits", "exited with status 7"),
        ("rude:nonsense", "returned dict"),
        ("rude:wrong_on_one", "rank 1"),
        ("rude:not_numbers", "not finite"),
    ],
)
def test_the_reason_names_what_happened(rude_run: tuple[Path, Done], strategy: str, said: str) -> None:
    """In one line: the exception, the status, the signal, or the rank."""
    reasons = by_strategy(rude_run[1])[strategy]["reasons"]
    assert said in reasons[0]
    assert all("\n" not in reason for reason in reasons)


@pytest.mark.slow
def test_only_what_is_right_has_times(rude_run: tuple[Path, Done]) -> None:
    """Records have the documented fields; only an ok one carries times, and its samples."""
    _, done = rude_run
    assert done.err == ""
    for record in done.json["records"]:
        assert set(record) >= RECORD_FIELDS
        if record["outcome"] == "ok":
            assert set(record) >= OK_FIELDS
            assert record["reasons"] == []
            # In blocks, there and back again: one strategy had no plan to say that all fit together.
            assert record["interleaving"] == "abba"
            assert len(record["samples"]["decode"]) == 2 * 8
            assert len(record["ranks_median"]) == 2
            assert record["equivalence"]["outcome"] == "ok"
            assert record["collectives_counted"] == record["collectives_per_token"]
        else:
            times = ("seconds_per_step", "decode_tokens_per_second", "prefill_seconds", "samples")
            assert all(record.get(name) is None for name in times)
            assert record["reasons"]


@pytest.mark.slow
def test_the_log_that_a_record_names_holds_the_traceback(rude_run: tuple[Path, Done]) -> None:
    """From the record to the evidence; and all that a rank printed is in the run's log of that rank."""
    folder, done = rude_run
    run = folder / done.json["path"]
    log = run / by_strategy(done)["rude:raises_computing"]["log"]
    assert "in the middle of a forward pass" in (log / "rank-1" / "log").read_text()
    assert "Traceback" in (log / "rank-1" / "log").read_text()
    joined = (run / "logs" / "rank-1.log").read_text()
    assert "in the middle of a forward pass" in joined
    assert "fine: splitting" in joined


@pytest.mark.slow
def test_the_folder_holds_what_was_printed(rude_run: tuple[Path, Done]) -> None:
    """records.jsonl is what --json showed; request, environment and page lie beside it, and no reference is left."""
    folder, done = rude_run
    run = folder / done.json["path"]
    assert lines(run / "records.jsonl") == done.json["records"]
    assert json.loads((run / "sweep.json").read_text())["models"][0]["label"] == "llama"
    assert json.loads((run / "environment.json").read_text())["ranks"]
    assert (run / "report.html").is_file()
    assert list(run.rglob("*.safetensors")) == []


@pytest.mark.slow
def test_a_strategy_that_sleeps_is_hung_and_the_rest_goes_on(tmp_path: Path) -> None:
    """After --stall seconds without a sign: hung, though it was asked for a plan as well; the next one is timed."""
    folder = workplace(tmp_path)
    done = shardbench(
        *("run", "llama.json", "--strategy", "rude:sleeps,tensor", "--ranks", "2", "--steps", "8"),
        *("--context", "8", "--stall", STALL, "--json", "--expect", "rude:sleeps=hung"),
        cwd=folder,
    )
    records = by_strategy(done)
    assert {name: r["outcome"] for name, r in records.items()} == {"rude:sleeps": "hung", "tensor": "ok"}
    assert "made no progress" in records["rude:sleeps"]["reasons"][0]
    assert done.status == 0


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A run as most are: one rank, two, and a world size that the model does not divide by."""
    folder = workplace(tmp_path_factory.mktemp("small"))
    done = shardbench(
        *("run", "llama.json", "--strategy", "tensor,rude:raises_computing", "--ranks", "1,2,3"),
        *("--batch", "1,2", "--steps", "8", "--context", "8", "--json"),
        *("--expect", "rude:raises_computing=crashed"),
        cwd=folder,
    )
    return folder, done


def test_a_run_of_several_world_sizes(small_run: tuple[Path, Done]) -> None:
    """One rank and two are timed at both batches, three are infeasible in words and no failure of the run."""
    _, done = small_run
    assert done.err == ""
    found: dict[tuple[str, int], set[str]] = {}
    for record in done.json["records"]:
        assert set(record) >= RECORD_FIELDS
        found.setdefault((record["strategy"], record["ranks"]), set()).add(record["outcome"])
        if record["outcome"] == "ok":
            assert set(record) >= OK_FIELDS
            assert record["seconds_per_step"] > 0
            assert len(record["samples"]["decode"]) == 8
            assert record["equivalence"]["outcome"] == record["equivalence"]["at_shape"]["outcome"] == "ok"
    assert found == {
        ("tensor", 1): {"ok"},
        ("tensor", 2): {"ok"},
        ("tensor", 3): {"infeasible"},
        ("rude:raises_computing", 2): {"crashed"},
        ("rude:raises_computing", 3): {"crashed"},
    }
    assert done.status == 0
    assert len(done.json["records"]) == 10


def test_a_finished_run_resumes_to_itself(small_run: tuple[Path, Done]) -> None:
    """Nothing is left to do: no job is started and no record added."""
    folder, done = small_run
    records = (folder / done.json["path"] / "records.jsonl").read_bytes()
    jobs = sorted((folder / done.json["path"] / "logs").iterdir())
    again = shardbench("run", "--resume", done.json["run"], "--json", cwd=folder)
    assert again.status == 0
    assert again.json["records"] == done.json["records"]
    assert (folder / done.json["path"] / "records.jsonl").read_bytes() == records
    assert sorted((folder / done.json["path"] / "logs").iterdir()) == jobs


def test_a_run_that_was_cut_off_does_exactly_the_rest(small_run: tuple[Path, Done], tmp_path: Path) -> None:
    """Records that were written stay, byte by byte, a line cut in the middle costs that case; the rest is run."""
    folder, done = small_run
    there = workplace(tmp_path / "there")
    run = there / "results" / "runs" / "cut"
    (run / "logs").mkdir(parents=True)
    for name in ("sweep.json", "environment.json"):
        (run / name).write_bytes((folder / done.json["path"] / name).read_bytes())
    whole = (folder / done.json["path"] / "records.jsonl").read_bytes().splitlines(keepends=True)
    kept = b"".join(line for line in whole if json.loads(line)["ranks"] != 2)
    lost = next(line for line in whole if json.loads(line)["ranks"] == 2)
    (run / "records.jsonl").write_bytes(kept + lost[: len(lost) // 2])
    again = shardbench("run", "--resume", "cut", "--json", cwd=there)
    assert again.status == 0
    after = (run / "records.jsonl").read_bytes()
    assert after.startswith(kept)
    assert sorted(r["case"] for r in again.json["records"]) == sorted(r["case"] for r in done.json["records"])
    new = [json.loads(line) for line in after[len(kept) :].splitlines()[1:]]
    assert {record["ranks"] for record in new} == {2}
    assert len(new) == 4


def test_nothing_but_infeasible_is_a_failure_without_a_job(tmp_path: Path) -> None:
    """When the plan refuses every case, the run records why, starts no rank, and exits with 1."""
    folder = workplace(tmp_path)
    done = shardbench("run", "llama.json", "--strategy", "tensor", "--ranks", "3,5", "--json", cwd=folder)
    assert done.status == 1
    assert [record["outcome"] for record in done.json["records"]] == ["infeasible"] * 2
    assert all("ranks" in record["reasons"][0] for record in done.json["records"])
    assert list((folder / done.json["path"] / "logs").iterdir()) == []


# What follows scripts the jobs, so that every ending can be had at will.

Script = Callable[[JobSpec, Callable[[dict[str, Any]], None]], tuple[str, str]]


class Scripted:
    """A runner whose jobs are played: the reference always well, the ranks as the script says."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
        self.records: list[dict[str, Any]] = []
        self.jobs: list[Mapping[str, Any]] = []

        def run_job(_: Any, spec: JobSpec, into: Path, on_event: Callable[[dict[str, Any]], None]) -> Verdict:
            into.mkdir(parents=True)
            self.jobs.append(spec.work)
            if spec.work["kind"] == "reference":
                on_event({"rank": 0, "event": "referenced", "blocks": []})
                return Verdict("ok", "", "0" * 32, [], {}, into)
            return Verdict(*script(spec, on_event), "0" * 32, [], {}, into)

        monkeypatch.setattr(sweep, "run_job", run_job)
        place = Place(LocalHost(), {}, 2**30)
        source = Source("small", LLAMA, None, 0, "float32")
        settings = Settings(steps=8)
        self.runner = Runner(place, [source], settings, tmp_path / "logs", self.records.append)

    def run(self, *cases: Case) -> dict[str, str]:
        """Outcomes by case."""
        self.runner.run(cases)
        assert len(self.records) == len({record["case"] for record in self.records})
        return {record["case"]: record["outcome"] for record in self.records}

    def launched(self) -> list[list[str]]:
        """Strategies of each job of ranks."""
        return [list(work["strategies"]) for work in self.jobs if work["kind"] == "ranks"]


def case(strategy: str, batch: int = 1, ranks: int = 2) -> Case:
    """A case of the scripted runs."""
    backend = "none" if ranks == 1 else "mpi"
    return Case(f"{strategy} {ranks} {batch}", 0, strategy, ranks, backend, batch, 8, "ok")


def play(
    spec: JobSpec, tell: Callable[[dict[str, Any]], None], dies: Callable[[Sequence[str]], bool]
) -> tuple[str, str]:
    """Ranks that check all strategies and then time them in turn, and die where `dies` says."""
    names = list(spec.work["strategies"])
    for name in names:
        for rank in range(spec.ranks):
            tell({"rank": rank, "event": "begin", "phase": "check", "strategies": [name], "shape": None})
        for rank in range(spec.ranks):
            counted, payload = spec.work["planned"][name][rank]
            tell(
                {
                    "rank": rank,
                    "event": "checked",
                    "strategy": name,
                    "report": FINE.to_json(),
                    "counted": counted,
                    "payload": payload,
                }
            )
        for shape in spec.work["shapes"]:
            fields = {"strategy": name, "shape": shape, "report": FINE.to_json()}
            for rank in range(spec.ranks):
                tell({"rank": rank, "event": "shape_checked", **fields})
    for shape in spec.work["shapes"]:
        for rank in range(spec.ranks):
            tell({"rank": rank, "event": "begin", "phase": "time", "strategies": names, "shape": shape})
        if dies(names):
            return "crashed", "rank 1 was killed by SIGKILL"
        for name in names:
            for rank in range(spec.ranks):
                tell(
                    {
                        "rank": rank,
                        "event": "timed",
                        "strategy": name,
                        "shape": shape,
                        "decode": [0.1] * 8,
                        "warmup": [0.1],
                        "prefill": [0.1],
                        "prefill_warmup": [0.1],
                        "tokens_per_second": 10.0,
                        "tokens_digest": ["x"],
                        "interleaving": "burst",
                        "launcher": {},
                    }
                )
    return "ok", ""


def test_when_strategies_take_turns_the_guilty_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that dies while it times two of them accuses neither: each gets a job of its own, and one dies again."""
    script = Scripted(tmp_path, monkeypatch, lambda spec, tell: play(spec, tell, lambda n: "upstream" in n))
    found = script.run(case("tensor"), case("upstream"))
    assert found == {"tensor 2 1": "ok", "upstream 2 1": "crashed"}
    assert script.launched() == [["tensor", "upstream"], ["tensor"], ["upstream"]]


def test_a_sweep_of_jobs_that_always_die_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job settles or singles out a case, so that even then there is an end, with a record for every case."""
    script = Scripted(tmp_path, monkeypatch, lambda spec, tell: play(spec, tell, lambda _: True))
    cases = [case(strategy, batch) for strategy in ("tensor", "upstream") for batch in (1, 2, 4)]
    assert set(script.run(*cases).values()) == {"crashed"}
    assert len(script.records) == 6
    assert len(script.launched()) <= 3 * 6


def test_a_job_that_never_begins_settles_all_its_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch is enough to know."""
    script = Scripted(tmp_path, monkeypatch, lambda *_: ("crashed", "a rank could not begin"))
    assert set(script.run(case("tensor"), case("upstream")).values()) == {"crashed"}
    assert len(script.launched()) == 1


def test_an_unreachable_host_ends_what_is_left_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was recorded before stays; the rest is unreachable, which a resumed run tries again."""
    calls: list[int] = []

    def script(spec: JobSpec, tell: Callable[[dict[str, Any]], None]) -> tuple[str, str]:
        calls.append(1)
        if len(calls) == 1:
            return play(spec, tell, lambda names: len(names) > 1)
        return "unreachable", "host lab: connection lost"

    scripted = Scripted(tmp_path, monkeypatch, script)
    found = scripted.run(case("tensor", ranks=1), case("tensor"), case("upstream"))
    assert found == {"tensor 1 1": "ok", "tensor 2 1": "unreachable", "upstream 2 1": "unreachable"}
    with RunStore.create(tmp_path / "results", {}, {}, "run") as store:
        for record in scripted.records:
            store.append(record)
        assert store.done() == {"tensor 1 1"}


def test_without_a_reference_no_case_can_be_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model that fails takes all of its cases with it, and no rank of a split one is started."""
    scripted = Scripted(tmp_path, monkeypatch, lambda *_: ("ok", ""))
    monkeypatch.setattr(
        sweep,
        "run_job",
        lambda host, spec, into, on_event: Verdict("crashed", "rank 0 ran out", "0" * 32, [], {}, into),
    )
    assert scripted.run(case("tensor"), case("upstream")) == {
        "tensor 2 1": "crashed",
        "upstream 2 1": "crashed",
    }
    assert scripted.records[0]["reasons"] == ["the unsharded model: rank 0 ran out"]


def test_what_does_not_fit_is_infeasible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the host, shared by all of its ranks, decides before anything is started."""
    scripted = Scripted(tmp_path, monkeypatch, lambda *_: ("ok", ""))
    scripted.runner.place = Place(LocalHost(), {}, 100_000)
    assert scripted.run(case("tensor")) == {"tensor 2 1": "infeasible"}
    assert "GiB" in scripted.records[0]["reasons"][0]
    assert scripted.jobs == []


def test_events_that_nobody_handed_on_count_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is killed keeps back what the ranks said last: their files say which case it was."""
    last = {"event": "begin", "phase": "load", "strategies": ["upstream"], "shape": None}

    def script(spec: JobSpec, tell: Callable[[dict[str, Any]], None]) -> tuple[str, str]:
        if len(spec.work["strategies"]) == 1:
            return play(spec, tell, lambda _: False)
        first = {"event": "begin", "phase": "load", "strategies": ["tensor"], "shape": None}
        for rank in range(spec.ranks):
            tell({"rank": rank, **first})
            folder = tmp_path / "logs" / "job-2" / f"rank-{rank}"
            folder.mkdir()
            (folder / "events.jsonl").write_text(f'{json.dumps(first)}\n{json.dumps(last)}\n{{"event": "be')
        return "crashed", "the agent was killed"

    scripted = Scripted(tmp_path, monkeypatch, script)
    assert scripted.run(case("tensor"), case("upstream")) == {"upstream 2 1": "crashed", "tensor 2 1": "ok"}


def test_a_prompt_must_fit_the_model(tmp_path: Path) -> None:
    """Ids beyond the model's vocabulary would be read from somewhere: refused, with the remedy."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"a": 0, "far": 500, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = Source("small", LLAMA, str(tmp_path), 0, "float32")
    assert tokenize(source, "a a b") == [0, 0, 1]
    for text, said in (("a far", "500"), ("", "no tokens")):
        with pytest.raises(UsageError, match=said):
            tokenize(source, text)
