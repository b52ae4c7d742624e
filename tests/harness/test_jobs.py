"""Jobs that go well, and what they leave: real mlx.launch, real ranks."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import psutil
import pytest

from harness import protocol
from harness.errors import Unreachable, UsageError
from harness.hosts import Agent, LocalHost
from harness.launch import JobSpec, StopJob, run_job
from tests.harness.jobs import DUMMY, Job, alive, assert_nothing_left, backends, kill, run, spec, wait_for


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("none", 1),
        ("mpi", 2),
        ("ring", 3),
        pytest.param("ring", 2, marks=pytest.mark.slow),
        pytest.param("mpi", 3, marks=pytest.mark.slow),
    ],
)
def test_every_rank_takes_part_once_and_the_verdict_is_ok(backend: str, ranks: int, tmp_path: Path) -> None:
    """N ranks find each other over the backend, each is a different one, and N records make the verdict."""
    verdict, events = run(spec(backend, ranks, {"collective": "once"}), tmp_path)
    assert verdict.outcome == "ok", verdict.reason
    assert [record["rank"] for record in verdict.ranks] == list(range(ranks))
    assert all(record["nonce"] == verdict.nonce and record["returncode"] == 0 for record in verdict.ranks)
    ready = [event for event in events if event["event"] == "ready"]
    assert sorted(event["rank"] for event in ready) == list(range(ranks))
    assert all(event["sum"] == ranks and event["backend"] == backend for event in ready)
    assert verdict.survivors == []
    if (
        backend == "mpi"
    ):  # mpirun serves its ranks all the time: it is never stopped, and what it used is counted
        assert verdict.launcher["stopped"] is False
        assert verdict.launcher["cpu_seconds"] > 0
    assert not Path(ready[0]["jobdir"]).exists()


def test_one_rank_runs_without_the_launcher(tmp_path: Path) -> None:
    """A single rank is started directly, and is told that there is no backend, whatever the job names."""
    job = Job(spec("ring", 1, {"sleep": 30, "env": ["MLX_RANK", "MLX_HOSTFILE"]}), tmp_path)
    (ready,) = job.ready()
    parents = [process.cmdline() for process in psutil.Process(ready["pid"]).parents()]
    kill(ready["pid"])
    verdict = job.end()
    assert not any("mlx.launch" in word for line in parents for word in line)
    assert ready["backend"] == "none"
    assert ready["env"] == {"MLX_RANK": None, "MLX_HOSTFILE": None}
    assert verdict.launcher["pid"] is None


def test_a_rank_gets_the_jobs_environment_and_none_of_another_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank sees what the job sets, text for text; what an outer launcher left in the shell does not reach it."""
    monkeypatch.setenv("MLX_RANK", "7")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "7")
    monkeypatch.setenv("MLX_HOSTFILE", "/nowhere")
    env = {"GREETING": 'it\'s $HOME; `id` "quoted" ünï\nsecond line', "PYTHONPATH": "/somewhere else"}
    names = [*env, "OMPI_COMM_WORLD_RANK", "MLX_RANK", "SHARDBENCH_RANK", "SHARDBENCH_RANKS", "PATH"]
    for backend in ("none", "ring"):
        ranks = 1 if backend == "none" else 2
        verdict, events = run(spec(backend, ranks, {"env": names}, env=env), tmp_path / backend)
        assert verdict.outcome == "ok", verdict.reason
        for event in events:
            seen = event["env"]
            assert seen["GREETING"] == env["GREETING"]
            assert seen["PYTHONPATH"].split(os.pathsep)[-1] == env["PYTHONPATH"]
            assert seen["OMPI_COMM_WORLD_RANK"] is None
            assert seen["MLX_RANK"] == (None if ranks == 1 else str(event["rank"]))
            assert (seen["SHARDBENCH_RANK"], seen["SHARDBENCH_RANKS"]) == (str(event["rank"]), str(ranks))
            assert seen["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_events_arrive_while_the_rank_runs_and_long_ones_whole(tmp_path: Path) -> None:
    """Each event comes with its rank, in order, as it happens; one of 300,000 characters comes in one piece."""
    job = Job(spec("none", 1, {"steps": 8, "big_event": 300_000, "sleep": 30}), tmp_path)
    assert wait_for(lambda: len(job.named("step")) == 8, 20)
    kill(job.ready()[0]["pid"])
    verdict = job.end()
    assert [event["step"] for event in job.named("step")] == list(range(8))
    assert job.named("big")[0]["text"] == "ä" * 300_000
    lines = (verdict.jobdir_copy / "rank-0" / "events.jsonl").read_text().splitlines()
    assert [{"rank": 0, **json.loads(line)} for line in lines] == job.events


@backends("ring", of=("mpi", "ring"))
def test_ten_megabytes_of_output_block_nothing_and_are_kept(backend: str, tmp_path: Path) -> None:
    """Two ranks that print 5 MB to both stdout and stderr end in order, and their logs hold all of it."""
    size = 5 << 20
    verdict, _ = run(spec(backend, 2, {"noise": size}), tmp_path)
    assert verdict.outcome == "ok", verdict.reason
    for rank in range(2):
        log = (tmp_path / f"rank-{rank}" / "log").read_bytes()
        assert log.count(b"\n") == 2 * size // 1024
        assert log.count(b"o" * 1023) == log.count(b"e" * 1023) == size // 1024


@backends("mpi", of=("mpi", "ring"))
def test_a_rank_that_ends_before_its_peers_does_not_end_the_job(backend: str, tmp_path: Path) -> None:
    """Rank 0 at status 0 says nothing about rank 1: the job is ok only when both have ended well."""
    verdict, events = run(spec(backend, 2, {"1": {"steps": 10}}), tmp_path)
    assert verdict.outcome == "ok", verdict.reason
    assert sum(event["event"] == "step" for event in events) == 10
    ended = {record["rank"]: record["ended"] for record in verdict.ranks}
    assert ended[0] < ended[1]


def test_the_ring_launcher_is_stopped_while_ranks_run_and_the_verdict_says_so(tmp_path: Path) -> None:
    """mlx.launch over ring spins a core: once all ranks run it is stopped, and uses no CPU time from then on."""
    job = Job(spec("ring", 2, {"sleep": 30}), tmp_path)
    ready = job.ready()
    launcher = psutil.Process(protocol.read_record(Path(ready[0]["jobdir"]) / "launcher.json")["pid"])  # type: ignore[index]
    assert "mlx.launch" in " ".join(launcher.cmdline())
    assert wait_for(lambda: launcher.status() == psutil.STATUS_STOPPED, 10)
    before = launcher.cpu_times()
    assert not wait_for(lambda: launcher.cpu_times() != before, 0.6)
    kill(ready[0]["pid"])
    verdict = job.end()
    assert verdict.launcher["stopped"] is True
    assert verdict.launcher["cpu_seconds"] >= before.user + before.system - 0.02


def test_two_ring_jobs_at_once_have_different_ports_and_end_separately(tmp_path: Path) -> None:
    """Jobs at the same time share no port, neither takes the launcher's default, and ending one leaves the other."""
    jobs = [Job(spec("ring", 2, {"collective": "once", "sleep": 30}), tmp_path / str(n)) for n in range(2)]
    ports: list[set[str]] = []
    for job in jobs:
        hosts = json.loads(Path(job.ready()[0]["hostfile"]).read_text())
        ports.append({address.rsplit(":")[-1] for host in hosts for address in host})
    for job in jobs:
        assert all(alive(event["pid"]) for event in job.ready())  # ending the other one touched none of these
        kill(job.ready()[0]["pid"])
        assert job.end().outcome == "crashed"
    assert [len(p) for p in ports] == [2, 2]
    assert not ports[0] & ports[1]
    assert "32323" not in ports[0] | ports[1]


@backends("ring", of=("mpi", "ring"))
def test_a_job_directory_with_spaces_and_quotes_works(backend: str, tmp_path: Path) -> None:
    """No name reaches a shell unquoted: neither here nor in mlx.launch's own script."""
    host = LocalHost(root=tmp_path / 'it\'s a "folder" $(touch broken)' / "jobs")
    job = Job(spec(backend, 2), tmp_path / "out put", host)
    verdict = job.end()
    assert verdict.outcome == "ok", verdict.reason
    assert "it's a" in job.ready()[0]["jobdir"]
    assert not list(tmp_path.rglob("broken"))


def test_files_are_delivered_and_everything_is_private(tmp_path: Path) -> None:
    """Extra files are in the job directory under their names; directory and files are for this user alone."""
    source = tmp_path / "a file"
    source.write_text("hello")
    job = Job(spec("none", 1, {"sleep": 30}, files={"weights.bin": source}), tmp_path / "out")
    (ready,) = job.ready()
    jobdir = Path(ready["jobdir"])
    content = (jobdir / "weights.bin").read_text()
    modes = {
        str(path.relative_to(jobdir)): stat.S_IMODE(path.stat().st_mode)
        for path in [jobdir, *jobdir.rglob("*")]
    }
    kill(ready["pid"])
    job.end()
    assert content == "hello"
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}
    assert not (tmp_path / "out" / "weights.bin").exists()
    assert not (tmp_path / "out" / "job.json").exists()


def test_on_event_can_stop_the_job_and_say_how_it_ended(tmp_path: Path) -> None:
    """StopJob ends the ranks at once; the verdict has its outcome and reason, and the logs are there."""
    events = []

    def stop(event: dict[str, object]) -> None:
        events.append(event)
        raise StopJob("the sums differ", outcome="wrong")

    verdict = run_job(LocalHost(), spec("none", 1, {"say": "hello", "sleep": 60}), tmp_path, stop)
    assert (verdict.outcome, verdict.reason) == ("wrong", "the sums differ")
    assert len(events) == 1
    assert [record["stopped"] for record in verdict.ranks] == [True]
    assert (tmp_path / "rank-0" / "log").is_file()
    assert_nothing_left(verdict.nonce, [record["pid"] for record in verdict.ranks], within=1.0)


def test_an_error_in_on_event_ends_the_job_and_goes_through(tmp_path: Path) -> None:
    """What on_event raises reaches the caller, after every process of the job has ended."""
    seen = {}

    def fail(event: dict[str, object]) -> None:
        seen.update(event)
        raise RuntimeError("broken callback")

    with pytest.raises(RuntimeError, match="broken callback"):
        run_job(LocalHost(), spec("none", 1, {"sleep": 60}), tmp_path, fail)
    assert not Path(str(seen["jobdir"])).exists()
    assert_nothing_left("-", [int(str(seen["pid"])), int(str(seen["supervisor"]))], within=1.0)


def test_a_host_that_is_lost_is_a_verdict_and_no_error(tmp_path: Path) -> None:
    """Unreachable, raised by the host at any point, becomes the outcome `unreachable` with its one-line reason."""

    class Lost(LocalHost):
        def start_agent(self, jobdir: str) -> Agent:
            raise Unreachable("host far away:\nconnection lost")

    verdict = run_job(Lost(), spec("none", 1), tmp_path, lambda event: None)
    assert (verdict.outcome, verdict.reason) == ("unreachable", "host far away: connection lost")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ranks": 0}, "ranks 0"),
        ({"ranks": 2, "backend": "none"}, "more than one rank needs mpi or ring"),
        ({"backend": "smoke"}, "backend 'smoke'"),
        ({"deadline_seconds": 0}, "deadline_seconds 0"),
        ({"stall_seconds": float("inf")}, "stall_seconds inf"),
        ({"argv": ()}, "argv ()"),
        ({"env": {"A=B": "x"}}, "environment variable 'A=B'"),
        ({"work": {"x": {1, 2}}}, "set"),
        ({"files": {"../x": Path(DUMMY)}}, "file '../x'"),
        ({"files": {"job.json": Path(DUMMY)}}, "the job itself uses that name"),
        ({"files": {"x": Path("/no/such/file")}}, "/no/such/file"),
    ],
)
def test_a_bad_request_is_refused_in_one_line(changes: dict[str, object], said: str) -> None:
    """A JobSpec can't be built in a bad state; the error names the field and the value."""
    fields: dict[str, object] = {
        "ranks": 1, "backend": "none", "argv": ("x",), "env": {}, "deadline_seconds": 1.0, "stall_seconds": 1.0, "work": {},
    }  # fmt: skip
    with pytest.raises(UsageError) as refusal:
        JobSpec(**{**fields, **changes})  # type: ignore[arg-type]
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_an_interpreter_without_mlx_launch_beside_it_works(tmp_path: Path) -> None:
    """The launcher is found by its module then; the interpreter here is a script in a folder of its own."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    job = Job(spec("ring", 2, {"collective": "once"}), tmp_path / "out", LocalHost(python=str(python)))
    verdict = job.end()
    assert verdict.outcome == "ok", verdict.reason
    assert verdict.launcher["stopped"] is True
