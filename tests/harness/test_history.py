"""asv's tree: what a run wrote is read by the real asv, and no crash, rival or odd file costs what was there."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import asvtree, history, series
from harness.runs import RunStore
from tests.harness.results_samples import environment, git, record, records, repository

ROOT = Path(__file__).resolve().parents[2]
DAY = 86400


def add(
    results: Path, commit: str | None, items: list[dict[str, Any]], day: int = 0, **changes: Any
) -> history.Added:
    """Make a run of `items` at `commit` and add it to asv's tree."""
    facts = environment(commit, 1_760_000_000 + day * DAY, **changes)
    with RunStore.create(results, {}, facts) as run:
        for item in items:
            run.append(item)
    return history.add_run(results, run)


def slower(items: list[dict[str, Any]], factor: float) -> list[dict[str, Any]]:
    """Return the records with all decode samples `factor` times as long."""
    found = []
    for item in items:
        decode = [value * factor for value in item["samples"]["decode"]]
        found.append({**item, "samples": {**item["samples"], "decode": decode}})
    return found


def results_of(results: Path) -> dict[str, Any]:
    """Load the one result file of the tree with asv's own class."""
    from asv.results import Results

    (path,) = [p for p in results.glob("*/*.json") if p.name != "machine.json" and p.parent.name != "runs"]
    return {"results": Results.load(str(path), machine_name=path.parent.name), "path": path}


def value_of(results: Path, item: dict[str, Any], kind: str = "decode") -> Any:
    """Return what asv holds for the point of a record."""
    loaded = results_of(results)["results"]
    name = series.benchmark_name(kind, series.series_of(item))
    params = loaded.get_result_params(name)
    point = tuple(repr(value) for value in series.point_of(item))
    return loaded.get_result_value(name, params)[list(itertools.product(*params)).index(point)]


class Clone:
    """A temporary clone of the project, as far as asv needs one, with its own home folder."""

    def __init__(self, folder: Path, commits: int) -> None:
        self.root = folder / "clone"
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.commits = repository(self.root, commits)
        self.results = self.root / "results"
        shutil.copy(ROOT / "asv.conf.json", self.root)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "bench", self.root / "bench", ignore=ignore)
        (self.root / "harness").mkdir()
        for name in ("__init__.py", "series.py"):
            shutil.copy(ROOT / "harness" / name, self.root / "harness")

    def asv(self, *arguments: str, code: int = 0) -> str:
        """Run asv in the clone, check its exit status and return what it printed."""
        variables = {"PATH": os.environ["PATH"], "HOME": str(self.home)}
        argv = [sys.executable, "-m", "asv", *arguments]
        done = subprocess.run(
            argv, cwd=self.root, env=variables, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Clone:
    """Three commits with a run each: the first without one strategy, the last 30 % slower."""
    made = Clone(tmp_path_factory.mktemp("asv"), 3)
    first = [item for item in records() if item["strategy"] != "gathered-wo_b"]
    for day, items in enumerate([first, records(), slower(records(), 1.3)]):
        assert not add(made.results, made.commits[day], items, day).notes
    return made


def test_asv_shows_what_a_run_wrote(clone):
    """`asv show` lists the commit's medians, with failed and untried points told apart."""
    rows = [line.split() for line in clone.asv("show", "HEAD~1").splitlines()]
    median = f"{records()[0]['seconds_per_step'] * 1e3:.1f}±"
    assert [row for row in rows if row[:4] == ["tensor", "2", "mpi", "1"] and row[4].startswith(median)]
    assert ["upstream", "2", "mpi", "1", "failed"] in rows
    assert ["tensor", "3", "mpi", "1", "n/a"] in rows
    assert ["my_shard:shard", "2", "mpi", "1", "failed"] in rows
    assert ["my_shard:shard", "2", "mpi", "4", "n/a"] in rows


def test_asv_lists_every_commit_with_a_run(clone):
    """`asv show` without a commit names all three."""
    shown = clone.asv("show")
    assert all(commit[:8] in shown for commit in clone.commits)


def test_a_point_that_did_not_exist_yet_is_not_called_failed(clone):
    """A strategy first measured at a later commit is "n/a" at the earlier one."""
    rows = [line.split() for line in clone.asv("show", "HEAD~2").splitlines()]
    assert ["gathered-wo_b", "2", "mpi", "1", "n/a"] in rows


def test_asv_compares_two_commits(clone):
    """`asv compare` marks the slower commit's points as worse by the factor that was injected, and only decode."""
    lines = clone.asv("compare", "HEAD~1", "HEAD").splitlines()
    worse = [line for line in lines if line.startswith("| +")]
    timed = [item for item in records() if item["outcome"] == "ok"]
    assert len(worse) == len(timed)
    assert all("1.30" in line and "decode." in line for line in worse)
    same = clone.asv("compare", "HEAD~1", "HEAD~1")
    assert not [line for line in same.splitlines() if line.startswith(("| +", "| -"))]


def test_asv_publishes_graphs_and_finds_the_regression(clone):
    """`asv publish` draws every series over the commits and names each slowed point with the commit that slowed it."""
    clone.asv("publish", "--no-pull")
    site = clone.root / ".asv" / "html"
    index = json.loads((site / "index.json").read_text())
    ours = {
        series.benchmark_name(kind, series.series_of(item)) for kind in series.KINDS for item in records()
    }
    assert ours <= set(index["benchmarks"])
    assert sorted(index["revision_to_hash"].values()) == sorted(clone.commits)
    found = json.loads((site / "regressions.json").read_text())["regressions"]
    named = {entry[0] for entry in found}
    timed = [item for item in records() if item["outcome"] == "ok" and item["strategy"] != "gathered-wo_b"]
    assert len(named) >= len(timed)
    assert all(name.startswith("decode.") for name in named)
    graphs = [
        path for path in site.rglob("*.json") if "graphs" in path.parts and path.name.startswith("decode.")
    ]
    assert graphs
    assert any(len(json.loads(path.read_text())) == 3 for path in graphs)


def test_asv_run_loses_nothing_and_invents_nothing(clone):
    """A real `asv run` discovers exactly what was declared, touches no result of ours and stores no number."""
    declared = json.loads((clone.results / "benchmarks.json").read_text())
    assert len(declared) == 1 + 4
    before = {path: path.read_bytes() for path in (clone.results / "studio-1").iterdir()}
    clone.asv("machine", "--yes")
    python = f"existing:{sys.executable}"
    shown = clone.asv("run", "-E", python, "--set-commit-hash", "HEAD", "--bench", "decode.*SmolLM")
    assert "n/a" in shown
    assert "failed" not in shown
    assert json.loads((clone.results / "benchmarks.json").read_text()) == declared
    assert {path: path.read_bytes() for path in (clone.results / "studio-1").iterdir()} == before
    own = next(path for path in clone.results.glob("*/*existing*.json"))
    stored = json.loads(own.read_text())["results"]
    assert all(math.isnan(value) for row in stored.values() for value in row[0])
    shutil.rmtree(own.parent)  # the other tests compare a tree of one machine
    clone.asv("check", "-E", python)


def test_only_ok_cases_have_numbers(tmp_path):
    """ok has its median, wrong, crashed and hung are null, infeasible and unreachable are NaN."""
    add(tmp_path, "a" * 40, records())
    seen = set()
    for item in records():
        value, outcome = value_of(tmp_path, item), item["outcome"]
        seen.add(outcome)
        if outcome == "ok":
            assert value == pytest.approx(item["seconds_per_step"], rel=1e-4)
        elif outcome in ("wrong", "crashed", "hung"):
            assert value is None
        else:
            assert math.isnan(value)
    assert seen == {"ok", "wrong", "crashed", "hung", "infeasible", "unreachable"}


def test_the_samples_are_kept(tmp_path):
    """asv's own statistics are computed from every sample, and the samples are stored with them."""
    add(tmp_path, "a" * 40, records())
    loaded = results_of(tmp_path)["results"]
    item = records()[0]
    for kind in ("decode", "prefill"):
        name = series.benchmark_name(kind, series.series_of(item))
        params = loaded.get_result_params(name)
        index = list(itertools.product(*params)).index(tuple(map(repr, series.point_of(item))))
        assert loaded.get_result_samples(name, params)[index] == item["samples"][kind]
        stats = loaded.get_result_stats(name, params)[index]
        assert stats["repeat"] == len(item["samples"][kind])
        assert stats["q_25"] <= value_of(tmp_path, item, kind) <= stats["q_75"]


def test_adding_a_run_twice_changes_nothing(tmp_path):
    """The second time no file is written."""
    facts = environment("a" * 40)
    with RunStore.create(tmp_path, {}, facts) as run:
        for item in records():
            run.append(item)
    first = history.add_run(tmp_path, run)
    assert {path.name for path in first.files} >= {"series.jsonl", "benchmarks.json", "machine.json"}
    assert history.add_run(tmp_path, run) == history.Added()


def test_two_runs_of_one_commit_share_a_file(tmp_path):
    """A second run adds its points; a point measured again is replaced, and the rest stays."""
    one, other = record(batch=1), record(batch=2, case="other")
    add(tmp_path, "a" * 40, [one, other])
    again = slower([record(batch=1)], 2.0)[0]
    third = record(strategy="new", case="new")
    add(tmp_path, "a" * 40, [again, third])
    assert value_of(tmp_path, one) == pytest.approx(2 * one["seconds_per_step"], rel=1e-4)
    assert value_of(tmp_path, other) == pytest.approx(other["seconds_per_step"], rel=1e-4)
    assert value_of(tmp_path, third) == pytest.approx(third["seconds_per_step"], rel=1e-4)
    assert math.isnan(value_of(tmp_path, record(strategy="new", batch=2)))


@pytest.mark.parametrize(
    "changes",
    [
        {"mlx_variables": {}},
        {"mlx_variables": {"MLX_METAL_FAST_SYNCH": "0"}},
        {"threads": {"OPENBLAS_NUM_THREADS": "2"}},
        {"blas": {"name": "reference"}},
        {"versions": {"python": "3.11.9", "mlx": "0.33.0"}},
        {"git": {"commit": "a" * 40, "commit_time": 1_760_000_000, "dirty": True}},
        {"cluster": "four-studios"},
    ],
)
def test_unlike_conditions_never_share_a_series(tmp_path, changes):
    """A setting that can change a timing gets a result file and an axis of its own."""
    from asv.results import Results

    add(tmp_path, "a" * 40, [record()])
    add(tmp_path, "a" * 40, [record()], **changes)
    paths = [path for path in tmp_path.glob("*/*.json") if path.name != "machine.json"]
    assert len(paths) == 2
    axes = []
    for path in paths:
        loaded = Results.load(str(path), machine_name=path.parent.name)
        axes.append({**loaded.params, **loaded.env_vars})
    assert axes[0] != axes[1]


def test_where_a_rank_ran_is_no_condition():
    """Rank numbers, host files and addresses don't split a history."""
    place = {"MLX_RANK": "1", "MLX_HOSTFILE": "/tmp/x", "MLX_JACCL_COORDINATOR": "10.0.0.1:1"}
    same = history.environment_axes(environment(mlx_variables={"MLX_METAL_FAST_SYNCH": "1", **place}))
    assert same == history.environment_axes(environment())


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("studio-1.local", "studio-1.local"),
        ("../../etc", "_.._etc"),
        ("runs", "runs-host"),
        ("Ann's Mac", "Ann_s_Mac"),
        ("", "unknown"),
        ("..", "unknown"),
    ],
)
def test_a_machine_name_is_a_folder_and_nothing_more(name, safe):
    """No host or cluster name leads out of the results folder or into runs/."""
    assert history.machine_name({"machine": {"name": name}}) == safe
    assert history.machine_name({"cluster": {"name": name or "x"}}) == (safe if name else "x")


def test_without_a_commit_there_is_one_note_and_no_file(tmp_path):
    """A run outside a clone keeps its own folder and leaves asv's tree as it was, here empty."""
    added = add(tmp_path, None, records())
    assert added.files == ()
    assert len(added.notes) == 1
    assert "not a git clone" in added.notes[0]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_record_without_its_parameters_is_left_out_by_name(tmp_path):
    """A record of another version that lacks the batch is named, and the others are added."""
    bad = record(case="old")
    del bad["batch"]
    added = add(tmp_path, "a" * 40, [bad, record()])
    assert [note for note in added.notes if "old" in note and "batch" in note]
    assert value_of(tmp_path, record()) is not None


@pytest.mark.parametrize("keep", [0, 1, 500])
def test_a_truncated_result_is_set_aside_and_replaced(tmp_path, keep):
    """A file cut short is kept under another name, said, and the new result is whole."""
    add(tmp_path, "a" * 40, [record()])
    path = results_of(tmp_path)["path"]
    path.write_bytes(path.read_bytes()[:keep])
    added = add(tmp_path, "a" * 40, [record()])
    assert any("was damaged" in note for note in added.notes)
    assert len(list(path.parent.glob("*.damaged-*"))) == 1
    assert value_of(tmp_path, record()) == pytest.approx(record()["seconds_per_step"], rel=1e-4)


def test_damaged_common_files_are_made_again(tmp_path):
    """benchmarks.json, machine.json and the series file come back whole, with all series that the tree still knows."""
    add(tmp_path, "a" * 40, records())
    wanted = json.loads((tmp_path / "benchmarks.json").read_text())
    known = series.known(tmp_path)
    (tmp_path / "series.jsonl").unlink()
    (tmp_path / "studio-1" / "machine.json").write_text("{")
    added = add(tmp_path, "a" * 40, [record()])
    assert any("machine.json was damaged" in note for note in added.notes)
    assert series.known(tmp_path) == known
    (tmp_path / "benchmarks.json").write_text("[")
    added = add(tmp_path, "a" * 40, [record()])
    assert any("benchmarks.json was damaged" in note for note in added.notes)
    assert json.loads((tmp_path / "benchmarks.json").read_text()) == wanted


def test_foreign_benchmarks_stay_declared(tmp_path):
    """A benchmark that is not ours keeps its entry in benchmarks.json."""
    add(tmp_path, "a" * 40, [record()])
    path = tmp_path / "benchmarks.json"
    declared = json.loads(path.read_text())
    foreign = {
        "name": "load.Load.time_load",
        "params": [],
        "param_names": [],
        "type": "time",
        "unit": "seconds",
        "version": "x",
    }
    path.write_text(json.dumps({**declared, foreign["name"]: foreign}))
    add(tmp_path, "a" * 40, [record(batch=99)])
    assert json.loads(path.read_text())[foreign["name"]] == foreign


def test_commits_with_the_same_first_digits_do_not_mix(tmp_path):
    """asv names files by eight digits; a second commit with the same ones is refused, and the first one's file kept."""
    first, second = "a" * 40, "a" * 8 + "b" * 32
    add(tmp_path, first, [record()])
    before = results_of(tmp_path)["path"].read_bytes()
    added = add(tmp_path, second, slower([record()], 3.0))
    assert any("first eight" in note for note in added.notes)
    assert results_of(tmp_path)["path"].read_bytes() == before


def test_an_update_of_the_system_does_not_end_a_graph(tmp_path):
    """A new OS version leaves machine.json and the axes as they are; other hardware is said and begins anew."""
    add(tmp_path, "a" * 40, [record()])
    machine = environment()["machine"]
    added = add(tmp_path, "a" * 40, [record()], machine={**machine, "os": "macOS 27.0"})
    assert added.notes == ()
    assert results_of(tmp_path)["results"].params["os"] == "macOS 26.3"
    added = add(tmp_path, "b" * 40, [record()], machine={**machine, "chip": "Apple M5 Max"})
    assert any("hardware" in note for note in added.notes)


def test_a_rival_that_holds_the_tree_is_waited_for_and_then_named(tmp_path):
    """While another process holds the lock nothing is written, and the note says what to do."""
    with RunStore.create(tmp_path, {}, environment("a" * 40)) as run:
        run.append(record())
    with (tmp_path / asvtree.LOCK).open("a") as rival:
        fcntl.flock(rival, fcntl.LOCK_EX)
        added = history.add_run(tmp_path, run, lock_seconds=0.2)
        assert added.files == ()
        assert f"--resume {run.run_id}" in added.notes[0]
        assert not (tmp_path / "benchmarks.json").exists()
    assert history.add_run(tmp_path, run, lock_seconds=0.2).files


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    """Two processes that add ten runs each leave twenty points in one file."""
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.harness.test_history import add; from tests.harness.results_samples import record\n"
        "for number in range(10):\n"
        "    add(Path(sys.argv[1]), 'a' * 40, [record(strategy=f'{sys.argv[2]}{number}')])\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path)]
    writers = [subprocess.Popen([*argv, name], cwd=ROOT) for name in ("left", "right")]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    for name, number in itertools.product(("left", "right"), range(10)):
        assert value_of(tmp_path, record(strategy=f"{name}{number}")) == pytest.approx(
            record()["seconds_per_step"], rel=1e-4
        )
    assert not (tmp_path / asvtree.STAGING).exists()


def test_a_crash_between_two_files_is_healed_by_the_next_run(tmp_path, monkeypatch):
    """Whichever file was the last that got written, the next run completes the tree."""
    for survive in range(4):
        results = tmp_path / str(survive)
        count = itertools.count()
        publish = asvtree.Tree.publish

        def dying(tree, relative, count=count, publish=publish, survive=survive):
            if next(count) >= survive:
                raise KeyboardInterrupt
            publish(tree, relative)

        with monkeypatch.context() as patch:
            patch.setattr(asvtree.Tree, "publish", dying)
            if survive < 3:
                with pytest.raises(KeyboardInterrupt):
                    add(results, "a" * 40, records())
            else:
                add(results, "a" * 40, records())
        add(results, "a" * 40, records())
        assert value_of(results, record()) == pytest.approx(record()["seconds_per_step"], rel=1e-4)
        assert len(json.loads((results / "benchmarks.json").read_text())) == 1 + 4


def test_a_tree_that_cant_be_written_is_told_in_one_line(tmp_path):
    """A results folder that is a file gives a note that names it, and no error: the run itself is safe."""
    with RunStore.create(tmp_path, {}, environment("a" * 40)) as run:
        run.append(record())
    (tmp_path / "file").write_text("")
    added = history.add_run(tmp_path / "file", run)
    assert added.files == ()
    assert "can't write" in added.notes[0]


@pytest.mark.parametrize("checkout", [["--detach"], ["-b", "feature"]])
def test_graphs_are_drawn_in_any_checkout(tmp_path, checkout):
    """On a branch of any name, or on none as in CI, publish draws the commits that HEAD can reach.

    A result whose commit was rebased away is left out and stops nothing.
    """
    made = Clone(tmp_path, 2)
    git(made.root, "checkout", "-q", *checkout)
    git(made.root, "branch", "-q", "-D", "main")
    for day, commit in enumerate([*made.commits, "d" * 40]):
        add(made.results, commit, [record()], day)
    assert made.commits[1][:8] in made.asv("show")
    made.asv("compare", "HEAD~1", "HEAD")
    made.asv("publish", "--no-pull")
    graphs = [
        path
        for path in (made.root / ".asv/html/graphs").rglob("decode.*.json")
        if "summary" not in path.parts
    ]
    assert [len(json.loads(path.read_text())) for path in graphs] == [2]
