"""The environment record: what each system says is understood, and no secret is taken along."""

from __future__ import annotations

import json
import os
import platform

import pytest

from harness import environment
from tests.harness.results_samples import environment as sample
from tests.harness.results_samples import git, repository


def test_the_record_has_what_must_stand_beside_a_number():
    """Versions, machine, state, BLAS, threads and commit are there, and JSON can hold all of it."""
    found = environment.collect(blas={"name": "reference"})
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["mlx"]
    assert found["versions"]["mlx-lm"]
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["machine"]["memory_bytes"] > found["state"]["memory_available_bytes"] > 0
    assert len(found["state"]["load"]) == 3
    assert found["blas"] == {"name": "reference"}
    assert "commit" in found["git"]
    json.dumps(found, allow_nan=False)


def test_a_rank_reports_its_device_only_when_it_has_one():
    """The view of a process with MLX names MLX's device and the BLAS that MLX calls."""
    import mlx.core as mx

    view = environment.rank_view()
    assert view["device"] == str(mx.default_device())
    assert view["blas"]["name"] not in ("none", "")


def test_variables_of_mlx_are_kept_and_secrets_are_not(monkeypatch):
    """MLX_* settings are recorded; tokens, even under that prefix, and everything else are not."""
    variables = {
        "MLX_METAL_FAST_SYNCH": "1",
        "MLX_API_TOKEN": "s3",
        "HF_TOKEN": "s3",
        "HOME": "/h",
        "XMLX_A": "1",
    }
    assert environment.mlx_variables(variables) == {"MLX_METAL_FAST_SYNCH": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert "s3" not in json.dumps(environment.collect(blas={}))


def test_only_known_thread_variables_are_kept():
    """Thread counts are recorded under their own names and nothing that looks alike."""
    given = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "2", "MY_NUM_THREADS": "3"}
    assert environment.thread_variables(given) == {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC 7763\nflags\t: fpu\n", "AMD EPYC 7763"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n\nHardware\t: BCM2835\n", "BCM2835"),
        ("", None),
    ],
)
def test_the_chip_is_read_from_linux(text, expected):
    """The processor's name is found where the kernel gives one, and is None where not."""
    assert environment.cpu_model(text) == expected


def test_thermal_limits_are_read_from_macos():
    """The limits that macOS reports come out as percentages; a Mac that records none gives an empty record."""
    hot = "Note: No thermal warning level has been recorded\nCPU Power notify\n\tCPU_Scheduler_Limit \t= 100\n\tCPU_Available_CPUs \t= 8\n\tCPU_Speed_Limit \t= 71\n"
    assert environment.thermal_limits(hot) == {
        "cpu_scheduler_limit": 100,
        "cpu_available_cpus": 8,
        "cpu_speed_limit": 71,
    }
    assert environment.thermal_limits("Note: No thermal warning level has been recorded\n") == {}


def test_the_power_mode_is_read_from_macos():
    """Low power mode and the power mode are found among the other settings."""
    assert environment.power_mode(
        " standby 1\n lowpowermode         1\n powermode            2\n sleep 0\n"
    ) == {
        "low_power_mode": 1,
        "power_mode": 2,
    }


def test_a_setting_that_reached_one_rank_only_is_named():
    """The variable, the ranks and both values are said; a variable that must differ is not a difference."""
    views = [
        {"mlx_variables": {"MLX_METAL_FAST_SYNCH": "1", "MLX_RANK": "0"}, "versions": {"mlx": "0.32.4"}},
        {"mlx_variables": {"MLX_RANK": "1"}, "versions": {"mlx": "0.32.4"}},
    ]
    assert environment.differences(views) == ["mlx variables: MLX_METAL_FAST_SYNCH (rank 0: 1, rank 1: None)"]


def test_the_views_of_many_jobs_name_each_value_once():
    """Ranks say which of how many they are, and a value that many share is mentioned for one of them."""
    views = [{"rank": f"{rank} of 2", "threads": {"OMP_NUM_THREADS": str(1 + rank)}} for rank in (0, 1, 0, 1)]
    assert environment.differences(views) == ["threads: OMP_NUM_THREADS (rank 0 of 2: 1, rank 1 of 2: 2)"]
    assert environment.differences([{"mlx_variables": {}}, {"mlx_variables": {"MLX_MPI_LIBNAME": "x"}}]) == []


def test_what_the_ranks_agree_on_replaces_what_the_controller_saw():
    """A rank was timed, so its BLAS and variables are the run's; where ranks differ both stay and it is said."""
    view = {
        "blas": {"name": "openblas"},
        "mlx_variables": {},
        "threads": {"OMP_NUM_THREADS": "1"},
        "versions": {"mlx": "1"},
    }
    busier = {**view, "blas": {"name": "openblas", "calls": 9}}
    merged = environment.with_ranks(sample(), [view, busier])
    assert merged["blas"] == {"name": "openblas"}
    assert merged["ranks"] == [view, busier]
    assert merged["threads"] == {"OMP_NUM_THREADS": "1"}
    assert merged["versions"]["mlx"] == "1"
    assert merged["versions"]["mlx-lm"] == "0.32.2"
    assert merged["rank_differences"] == []
    split = environment.with_ranks(sample(), [view, {**view, "blas": {"name": "reference"}}])
    assert split["blas"] == sample()["blas"]
    assert split["rank_differences"] == ["blas: name (rank 0: openblas, rank 1: reference)"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"blas": {"name": "reference"}}, "reference BLAS"),
        ({"state": {"load": [31.0, 1, 1]}}, "busy"),
        ({"git": {"commit": "abcdef0123", "dirty": True}}, "abcdef01"),
        ({"state": {"power": {"source": "battery"}}}, "battery"),
        ({"state": {"thermal": {"cpu_speed_limit": 71}}}, "71 %"),
        ({"rank_differences": ["mlx (rank 0: 1, rank 1: 2)"]}, "ranks differ in mlx"),
    ],
)
def test_a_condition_that_changes_the_numbers_is_said(changes, said):
    """Each condition has its sentence, and a run without it has none."""
    assert environment.notes(sample()) == []
    found = environment.notes(sample(**changes))
    assert len(found) == 1
    assert said in found[0]


def test_an_empty_record_has_nothing_to_say():
    """A record of another version, without any of the fields, is read without an error."""
    assert environment.notes({}) == []


def test_a_clean_clone_names_its_commit(tmp_path):
    """The commit, its time and its branch are git's own, and the tree is clean."""
    (commit,) = repository(tmp_path / "r")
    found = environment.git_state(tmp_path / "r")
    assert found == {
        "commit": commit,
        "commit_time": int(git(tmp_path / "r", "show", "-s", "--format=%ct")),
        "branch": "main",
        "dirty": False,
    }


def test_changed_code_is_dirty_and_results_are_not(tmp_path):
    """A changed tracked file counts; new files, and whatever a run writes under results/, do not."""
    repo = tmp_path / "r"
    repository(repo)
    (repo / "results").mkdir()
    (repo / "results" / "a.json").write_text("1")
    git(repo, "add", "results/a.json")
    git(repo, "commit", "-q", "-m", "results")
    (repo / "results" / "a.json").write_text("2")
    (repo / "new.txt").write_text("")
    assert environment.git_state(repo)["dirty"] is False
    (repo / "code.txt").write_text("changed")
    assert environment.git_state(repo)["dirty"] is True


def test_code_outside_a_clone_has_no_commit(tmp_path):
    """Neither a plain folder, nor one installed inside somebody else's repository, borrows a commit."""
    repository(tmp_path / "theirs")
    (tmp_path / "theirs" / "site-packages").mkdir()
    (tmp_path / "plain").mkdir()
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    for folder in ("theirs/site-packages", "plain", "empty", "missing"):
        found = environment.git_state(tmp_path / folder)
        assert found["commit"] is None
        assert found["note"]


def test_a_git_hook_does_not_misdirect_the_question(tmp_path, monkeypatch):
    """GIT_DIR of the calling process, as set in hooks, does not change whose commit is named."""
    (other,) = repository(tmp_path / "other")
    (tmp_path / "r").mkdir()
    (mine,) = repository(tmp_path / "r")
    git(tmp_path / "r", "commit", "-q", "--amend", "-m", "mine")
    mine = git(tmp_path / "r", "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert environment.git_state(tmp_path / "r")["commit"] == mine != other


def test_the_version_of_a_missing_package_is_none():
    """A package that is not installed is recorded as such."""
    assert environment.version("no-such-package-here") is None
