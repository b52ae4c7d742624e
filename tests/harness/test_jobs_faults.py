"""Ranks that fail, stall, resist or lie: each fault is caused for real, and judged by the ranks' own records."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from harness.hosts import LocalHost
from harness.launch import run_job
from tests.harness.jobs import Job, backends, kill, ranks_of, run, spec, wait_for

LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="Linux alone shows another process's shared memory"
)


@backends("none", "ring")
def test_a_rank_that_exits_non_zero_is_crashed_with_rank_code_and_last_line(
    backend: str, tmp_path: Path
) -> None:
    """mlx.launch exits 0 all the same; the verdict names the rank, its status and the last thing it printed."""
    ranks = ranks_of(backend)
    last = ranks - 1
    work = {
        "sleep": 60,
        str(last): {"sleep": 0, "status": 7, "say": "first line\nno such\x1b[31m layer\x1b[0m\n\n"},
    }
    verdict, _ = run(spec(backend, ranks, work), tmp_path)
    assert verdict.outcome == "crashed"
    assert verdict.reason == f"rank {last} exited with status 7: no such layer"
    assert len(verdict.ranks) == ranks
    assert [record["returncode"] for record in verdict.ranks if record["rank"] == last] == [7]
    assert "first line" in (tmp_path / f"rank-{last}" / "log").read_text()


@backends("mpi", of=("mpi", "ring"))
def test_an_exception_amid_collectives_is_crashed_not_hung(backend: str, tmp_path: Path) -> None:
    """A rank that raises while its peer waits for it is to blame: not the peer that lost it, and not a stall.

    Under MPI an ordinary exit would wait for the peer; under ring the peer raises an error of its own.
    """
    work = {"collective": "forever", "0": {"collective": "once", "raise": "layer 3 is broken"}}
    verdict, events = run(spec(backend, 2, work), tmp_path)
    assert len(events) == 2
    assert verdict.outcome == "crashed"
    assert verdict.reason.startswith("rank 0 exited with status 1: ValueError: layer 3 is broken")


def test_a_rank_that_crashes_names_the_signal_and_shows_where(tmp_path: Path) -> None:
    """A segmentation fault shows as the signal's name, and the Python stack is in the log."""
    verdict, _ = run(spec("none", 1, {"signal": int(signal.SIGSEGV)}), tmp_path)
    assert verdict.outcome == "crashed"
    assert verdict.reason.startswith("rank 0 was killed by SIGSEGV")
    assert verdict.ranks[0]["signal"] == "SIGSEGV"
    assert "dummy.py" in (tmp_path / "rank-0" / "log").read_text()


@backends("ring", of=("mpi", "ring"))
def test_a_stopped_rank_is_hung_and_named(backend: str, tmp_path: Path) -> None:
    """A rank that is stopped amid collectives makes all ranks silent; the verdict names the one that is stopped."""
    job = Job(spec(backend, 2, {"collective": "forever"}, stall_seconds=3.0), tmp_path)
    kill(job.ready()[1]["pid"], signal.SIGSTOP)
    verdict = job.end()
    assert verdict.outcome == "hung"
    assert verdict.reason.startswith("rank 1 (stopped) made no progress for 3 s")
    assert [record["stopped"] for record in verdict.ranks] == [True, True]


def test_a_rank_that_loops_silently_is_hung_and_its_log_shows_where(tmp_path: Path) -> None:
    """No event for stall_seconds is a hang however busy the rank is; its Python stack is written to its log."""
    verdict, _ = run(
        spec("ring", 2, {"spin": True, "1": {"spin": False, "steps": 1000}}, stall_seconds=2.0), tmp_path
    )
    assert verdict.outcome == "hung"
    assert verdict.reason.startswith("rank 0 (")
    assert "rank 1" not in verdict.reason  # it reported all the time
    assert "dummy.py" in (tmp_path / "rank-0" / "log").read_text()


@pytest.mark.slow
def test_progress_is_not_a_stall_however_long_it_takes(tmp_path: Path) -> None:
    """A rank that goes on reporting outlives stall_seconds several times over."""
    verdict, events = run(spec("none", 1, {"steps": 100}, stall_seconds=2.0), tmp_path)
    assert verdict.outcome == "ok", verdict.reason
    assert len(events) == 101


def test_the_deadline_ends_a_job_that_makes_progress(tmp_path: Path) -> None:
    """Progress does not extend the deadline; the verdict is hung and says which ranks ran."""
    verdict, _ = run(spec("none", 1, {"steps": 2000}, deadline_seconds=2.0), tmp_path)
    assert verdict.outcome == "hung"
    assert verdict.reason.startswith("the deadline of 2 s passed, running: rank 0")


@backends("none")
def test_a_rank_that_ignores_sigterm_and_what_it_started_are_gone(backend: str, tmp_path: Path) -> None:
    """SIGKILL follows SIGTERM; a process the rank started in a session of its own is ended too."""
    job = Job(spec(backend, ranks_of(backend), {"ignore_term": True, "child": True, "sleep": 60}), tmp_path)
    jobdir = Path(job.ready()[0]["jobdir"])
    assert wait_for(lambda: len(job.named("child")) == ranks_of(backend), 10)
    (jobdir / "stop").touch()
    verdict = job.end()  # asserts that no pid that an event named is alive
    assert (verdict.outcome, verdict.reason) == ("crashed", "stopped on request")
    assert {record["signal"] for record in verdict.ranks} == {"SIGKILL"}
    assert len(verdict.ranks) == ranks_of(backend)


def test_what_a_rank_leaves_behind_ends_with_the_job_even_when_all_is_well(tmp_path: Path) -> None:
    """A daemon that a successful rank started does not outlive the job."""
    verdict, events = run(spec("none", 1, {"child": True}), tmp_path)
    assert verdict.outcome == "ok", verdict.reason
    assert [event["event"] for event in events] == ["ready", "child"]


@pytest.mark.slow
@LINUX
def test_killed_mpi_ranks_leave_no_shared_memory(tmp_path: Path) -> None:
    """Open MPI's segments in /dev/shm, 16 MB a rank, go with the job although its ranks are killed."""
    before = set(Path("/dev/shm").iterdir())
    job = Job(spec("mpi", 2, {"collective": "once", "ignore_term": True, "sleep": 60}), tmp_path)
    ready = job.ready()
    segments = {
        Path(line.split(maxsplit=5)[5].strip())
        for event in ready
        for line in Path(f"/proc/{event['pid']}/maps").read_text().splitlines()
        if "/dev/shm/" in line
    }
    kill(ready[0]["supervisor"])
    job.end()
    assert segments
    assert not segments & before
    assert not [path for path in segments if path.exists()]


def test_a_rank_that_prints_without_end_is_crashed(tmp_path: Path) -> None:
    """A log of more than 256 MiB ends the job before it fills the disk (here the rank only makes it look so large)."""
    verdict, _ = run(spec("none", 1, {"inflate": 300 << 20, "sleep": 60}), tmp_path)
    assert (verdict.outcome, verdict.reason) == ("crashed", "rank 0 printed more than 256 MiB")


def test_a_program_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    """The rank's program can't be started: crashed with the reason, no traceback."""
    verdict, _ = run(spec("none", 1, argv=("/no/such/script.py",)), tmp_path)
    assert verdict.outcome == "crashed"
    assert "No such file or directory" in verdict.reason
    assert "\n" not in verdict.reason


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_launcher_that_starts_nothing_is_crashed_not_awaited(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the launcher ends without having started its ranks, the verdict says so with what it printed."""
    broken = tmp_path / "site" / "sitecustomize.py"
    broken.parent.mkdir()
    broken.write_text(
        "import sys\n"
        "if any('supervise' in a or 'mlx.launch' in a for a in sys.orig_argv): sys.exit('this launcher is broken')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    verdict = run_job(LocalHost(), spec("ring", ranks), tmp_path / "out", lambda event: None)
    assert verdict.outcome == "crashed"
    assert verdict.reason.startswith("the launcher ended before rank 0 did")
    assert "this launcher is broken" in verdict.reason
