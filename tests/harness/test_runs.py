"""The run folder: whole or not at all, readable after any crash, written by one process at a time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.runs import RunStore, clean_record, parse_records
from tests.harness.results_samples import environment, record, records

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path):
    """A new run without records."""
    with RunStore.create(tmp_path, {"strategies": ["tensor"]}, environment()) as store:
        yield store


def test_a_new_run_holds_its_request_and_its_environment(tmp_path):
    """What was asked and where it ran can be read back from a run that has no record yet."""
    created = RunStore.create(tmp_path, {"strategies": ["tensor"]}, environment())
    opened = RunStore.open(tmp_path, created.run_id)
    assert opened.sweep() == {"strategies": ["tensor"]}
    assert opened.environment() == environment()
    assert opened.records() == []
    assert opened.done() == set()


def test_runs_made_in_one_second_have_names_of_their_own(tmp_path):
    """Many runs started at once do not share a folder."""
    names = {RunStore.create(tmp_path, {}, {}).run_id for _ in range(20)}
    assert len(names) == 20
    assert {run.run_id for run in RunStore.all(tmp_path)} == names


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "", ".hidden", "a..b", "x" * 101, "a b", "-x", "a\n"])
def test_a_run_id_cant_lead_out_of_its_folder(tmp_path, name):
    """A name that is no plain file name is refused, for a new run and for an old one."""
    with pytest.raises(UsageError, match="run id"):
        RunStore.create(tmp_path, {}, {}, run_id=name)
    with pytest.raises(UsageError, match="run id"):
        RunStore.open(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_a_taken_name_is_refused_and_the_old_run_kept(tmp_path):
    """Creating a run under an existing name changes nothing."""
    with RunStore.create(tmp_path, {"a": 1}, {}, run_id="mine") as first:
        first.append(record())
    with pytest.raises(UsageError, match="mine exists"):
        RunStore.create(tmp_path, {"a": 2}, {}, run_id="mine")
    assert RunStore.open(tmp_path, "mine").sweep() == {"a": 1}
    assert len(RunStore.open(tmp_path, "mine").records()) == 1


def test_a_run_that_cant_be_made_leaves_nothing(tmp_path):
    """A results folder that is a file, or a request that is no JSON, gives no half-made run."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't make the run folder"):
        RunStore.create(tmp_path / "file", {}, {})
    with pytest.raises(ValueError, match="JSON"):
        RunStore.create(tmp_path, {"bad": float("nan")}, {})
    assert RunStore.all(tmp_path) == []


def test_records_come_back_as_they_went_in(run):
    """Every field is kept, those that this version does not know included."""
    for one in records():
        run.append({**one, "from_the_future": [1, {"x": None}]})
    assert run.records() == [{**one, "from_the_future": [1, {"x": None}]} for one in records()]
    assert run.problems() == []


def test_the_last_record_of_a_case_counts(run):
    """A case that was tried again is listed once, with its last outcome."""
    run.append(record(case="a", outcome="unreachable", **dict.fromkeys(_TIMINGS)))
    run.append(record(case="b"))
    run.append(record(case="a"))
    assert [(r["case"], r["outcome"]) for r in run.records()] == [("a", "ok"), ("b", "ok")]


def test_a_resumed_run_repeats_only_what_was_unreachable(run):
    """Each case with a record is done, whatever its outcome, but for those whose host was never reached."""
    for one in records():
        run.append(one)
    done = run.done()
    assert done == {one["case"] for one in records() if one["outcome"] != "unreachable"}
    assert len(done) < len(records())


@given(st.integers(min_value=0, max_value=400))
def test_a_file_cut_at_any_byte_loses_only_the_line_that_was_cut(cut):
    """Whatever a crash leaves of records.jsonl, all whole lines before the cut are read."""
    lines = [
        json.dumps({"case": f"c{number}", "outcome": "ok", "text": "·" * 9}) + "\n" for number in range(5)
    ]
    data = "".join(lines).encode()[:cut]
    found, problems = parse_records(data)
    whole = data.count(b"\n")
    assert [one["case"] for one in found][:whole] == [f"c{number}" for number in range(whole)]
    assert len(found) - whole in (0, 1)  # the last line may lack nothing but its end
    assert len(problems) <= 1


def test_appending_after_a_crash_does_not_join_the_torn_line(tmp_path):
    """A record written after a crash stands on a line of its own, and the torn one is reported."""
    with RunStore.create(tmp_path, {}, {}, run_id="r") as store:
        store.append(record(case="a"))
    with (tmp_path / "runs/r/records.jsonl").open("ab") as stream:
        stream.write(b'{"case": "torn", "outco')
    with RunStore.open(tmp_path, "r") as again:
        again.append(record(case="b"))
    assert [one["case"] for one in again.records()] == ["a", "b"]
    assert again.problems() == ["line 2 is not JSON (cut short?) and was left out"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "names no case"),
        (b'{"outcome": "ok"}', "names no case"),
        (b'{"case": "a", "outcome": "fine"}', "unknown outcome 'fine'"),
        (b'{"case": "a", "outcome": "ok", "schema": 99}', "schema 99"),
    ],
)
def test_a_line_that_cant_be_used_is_named(line, problem):
    """No line is dropped without a word, and none makes the others unreadable."""
    found, problems = parse_records(line + b'\n{"case": "z", "outcome": "ok"}\n')
    assert found[-1] == {"case": "z", "outcome": "ok"}
    assert len(problems) == 1
    assert problem in problems[0]


def test_numbers_that_json_lacks_are_kept_by_name():
    """A distance that is NaN or infinite becomes null and stands under `nonfinite`, so the line stays strict JSON."""
    clean = clean_record(
        {"case": "a", "outcome": "wrong", "equivalence": {"kl": float("nan"), "max": np.float32("inf")}}
    )
    assert clean["equivalence"] == {"kl": None, "max": None}
    assert clean["nonfinite"] == {"equivalence.kl": "nan", "equivalence.max": "inf"}
    json.dumps(clean, allow_nan=False)


def test_numpy_numbers_become_plain_ones():
    """Scalars of NumPy, tuples and paths are written as JSON has them."""
    clean = clean_record(
        {"case": "a", "outcome": "ok", "n": np.int64(3), "x": (np.float64(0.5),), "p": Path("a/b")}
    )
    assert json.loads(json.dumps(clean)) == {
        "case": "a",
        "outcome": "ok",
        "n": 3,
        "x": [0.5],
        "p": "a/b",
        "schema": 1,
    }


_TIMINGS = ("seconds_per_step", "seconds_per_step_interval", "prefill_seconds", "decode_tokens_per_second")


@pytest.mark.parametrize("outcome", ["wrong", "crashed", "hung", "infeasible", "unreachable"])
@pytest.mark.parametrize("field", _TIMINGS)
def test_only_a_case_that_is_ok_carries_timings(run, outcome, field):
    """A time that belongs to a wrong or failed case is refused before it is written."""
    bad = record(**{**dict.fromkeys(_TIMINGS), "outcome": outcome, field: record()[field]})
    with pytest.raises(ValueError, match=field):
        run.append(bad)
    assert run.records() == []


@pytest.mark.parametrize(
    "bad", [{"outcome": "ok"}, {"case": "", "outcome": "ok"}, {"case": "a", "outcome": "okay"}]
)
def test_a_record_needs_a_case_and_one_of_the_six_outcomes(run, bad):
    """A record that no reader could use is refused before it is written."""
    with pytest.raises(ValueError, match=r"case|outcome"):
        run.append(bad)


def test_a_second_writer_is_refused_but_may_read(run):
    """Two processes can't resume one run at a time; reading goes on."""
    run.append(record(case="a"))
    second = RunStore.at(run.path)
    with pytest.raises(UsageError, match="written by another process"):
        second.append(record(case="b"))
    assert [one["case"] for one in second.records()] == ["a"]
    run.close()
    second.append(record(case="b"))
    second.close()
    assert second.done() == {"a", "b"}


def test_what_was_appended_survives_a_kill(tmp_path):
    """Each record that `append` returned from is there after SIGKILL, and the run can be continued."""
    RunStore.create(tmp_path, {}, {}, run_id="r")
    script = (
        "import sys; from pathlib import Path; from harness.runs import RunStore\n"
        "store = RunStore.open(Path(sys.argv[1]), 'r')\n"
        "for number in range(10**6):\n"
        "    store.append({'case': f'c{number}', 'outcome': 'ok', 'filler': 'x' * 3000}); print(number, flush=True)\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [int(process.stdout.readline()) for _ in range(25)]
        process.send_signal(signal.SIGKILL)
    with RunStore.open(tmp_path, "r") as store:
        store.append({"case": "after", "outcome": "ok"})
    assert {f"c{number}" for number in seen} | {"after"} <= store.done()


def test_a_run_is_found_by_name_by_path_and_as_the_latest(tmp_path):
    """`latest` is the newest run; a path works for a run that lies elsewhere."""
    old = RunStore.create(tmp_path, {}, {}, run_id="20250101-000000-aaaaaa")
    new = RunStore.create(tmp_path, {}, {}, run_id="20250102-000000-aaaaaa")
    assert RunStore.find(tmp_path, "latest").path == new.path
    assert RunStore.find(tmp_path, old.run_id).path == old.path
    assert RunStore.find(Path("elsewhere"), str(old.path)).path == old.path


def test_a_missing_run_is_told_with_what_there_is(tmp_path):
    """The message names the folder that was looked at and the runs that exist."""
    with pytest.raises(UsageError, match="there are no runs"):
        RunStore.find(tmp_path, "latest")
    RunStore.create(tmp_path, {}, {}, run_id="here")
    with pytest.raises(UsageError, match=r"no run folder.*here"):
        RunStore.open(tmp_path, "gone")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_damaged_request_is_told_in_one_line(tmp_path, content):
    """A file of the run that is no JSON object gives a message that names it."""
    store = RunStore.create(tmp_path, {}, {})
    (store.path / "sweep.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"sweep\.json"):
        store.sweep()


def test_the_environment_can_be_completed_later(tmp_path):
    """What the ranks report replaces the environment record in one step and leaves no other file."""
    store = RunStore.create(tmp_path, {}, environment())
    store.write_environment({**environment(), "ranks": [{"host": "a"}]})
    assert store.environment()["ranks"] == [{"host": "a"}]
    assert {path.name for path in store.path.iterdir()} == {
        "sweep.json",
        "environment.json",
        "records.jsonl",
        "logs",
    }
