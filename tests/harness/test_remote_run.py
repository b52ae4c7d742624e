"""`shardbench run --cluster FILE` through a real sshd: the same records as here, and no half-written run without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.shell import Done, lines, shardbench, workplace
from tests.lab.sshd import Sshd, make_key, sshd

__all__ = ["sshd"]  # a fixture

RUN = (
    "run",
    "llama.json",
    "--strategy",
    "tensor",
    "--ranks",
    "2",
    "--steps",
    "8",
    "--context",
    "8",
    "--json",
)


def describe(server: Sshd, folder: Path, **changes: Any) -> Path:
    """A cluster file of the one host; its workdir has a space and a quote in its name."""
    host = server.host(workdir=str(folder / "it's work"), **changes)
    keys = ("ssh", "name", "user", "port", "key", "known_hosts", "python", "workdir")
    values = {key: getattr(host, key) for key in keys}
    text = [f"{key} = {json.dumps(v if isinstance(v, int) else str(v))}" for key, v in values.items()]
    if host.env:
        text.append(f"env = {{ {', '.join(f'{k} = {json.dumps(v)}' for k, v in host.env.items())} }}")
    path = folder / "lab.toml"
    path.write_text("\n".join(['name = "lab"', 'backend = "mpi"', "[[hosts]]", *text]) + "\n")
    return path


@pytest.fixture(scope="module")
def runs(sshd: Sshd, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done, Done]:
    """The same run here and there."""
    folder = workplace(tmp_path_factory.mktemp("remote"))
    cluster = describe(sshd, folder)
    local = shardbench(*RUN, "--out", "local", cwd=folder)
    return folder, local, shardbench(*RUN, "--out", "remote", "--cluster", cluster, cwd=folder)


def test_a_remote_run_is_a_local_run(runs: tuple[Path, Done, Done]) -> None:
    """The same cases with the same outcomes, and records of the same shape, field by field."""
    _, local, remote = runs
    assert (remote.status, remote.err) == (0, "")
    here, there = local.json["records"], remote.json["records"]
    assert [record["case"] for record in there] == [record["case"] for record in here]
    assert [record["outcome"] for record in there] == ["ok"]
    for ours, theirs in zip(here, there, strict=True):
        assert set(theirs) == set(ours)
        for name in ("collectives_counted", "bytes_per_token", "weight_bytes_per_rank", "parameters"):
            assert theirs[name] == ours[name]
        assert set(theirs["equivalence"]) == set(ours["equivalence"])
        assert len(theirs["samples"]["decode"]) == len(ours["samples"]["decode"]) == 8
        assert len(theirs["ranks_median"]) == theirs["ranks"]


def test_what_it_left_is_all_here(runs: tuple[Path, Done, Done]) -> None:
    """Records, logs of each rank, and an environment that names the cluster and what its ranks saw."""
    folder, _, remote = runs
    run = folder / remote.json["path"]
    assert lines(run / "records.jsonl") == remote.json["records"]
    environment = json.loads((run / "environment.json").read_text())
    assert environment["cluster"]["name"] == "lab"
    assert environment["ranks"]
    assert (run / "logs" / "rank-1.log").is_file()
    assert list(run.rglob("*.safetensors")) == []


def test_nothing_of_the_jobs_is_left_there(runs: tuple[Path, Done, Done]) -> None:
    """The host keeps the code, for next time, and no job."""
    folder, _, _ = runs
    assert [path for path in (folder / "it's work").rglob("*") if path.name == "job.json"] == []


def test_a_remote_run_is_resumed_with_its_cluster(runs: tuple[Path, Done, Done]) -> None:
    """Without the file the rest could not be compared with what is there: refused in one line."""
    folder, _, remote = runs
    done = shardbench("run", "--resume", remote.json["run"], "--out", "remote", cwd=folder)
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert "--cluster" in done.err


@pytest.mark.parametrize("trust", ["nobody", "another key"])
def test_an_unverified_host_is_not_spoken_to(sshd: Sshd, tmp_path: Path, trust: str) -> None:
    """Unknown key or another one than is known: one line that names host and file, and nothing written anywhere."""
    folder = workplace(tmp_path)
    known = folder / "known"
    known.write_text("" if trust == "nobody" else f"{sshd.known_name} {make_key(folder / 'stranger')}\n")
    cluster = describe(sshd, folder, known_hosts=known)
    before = known.read_text()
    done = shardbench(*RUN, "--cluster", cluster, cwd=folder)
    assert done.status in (1, 2)
    assert done.out == ""
    assert done.err.count("\n") == 1, done.err
    assert "Traceback" not in done.err
    assert "internal error" not in done.err
    assert "lab" in done.err
    assert str(known) in done.err
    assert known.read_text() == before
    assert not (folder / "results").exists()
    assert not (folder / "it's work").exists()


def test_a_host_that_is_not_there_is_one_line(sshd: Sshd, tmp_path: Path) -> None:
    """Nothing listens: unreachable, status 1, nothing written."""
    import socket

    folder = workplace(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        cluster = describe(sshd, folder, port=taken.getsockname()[1])
        done = shardbench(*RUN, "--cluster", cluster, cwd=folder)
    assert done.status == 1
    assert done.err.count("\n") == 1, done.err
    assert "lab" in done.err
    assert not (folder / "results").exists()


def test_more_hosts_than_this_release_runs_on_are_refused(sshd: Sshd, tmp_path: Path) -> None:
    """Better no run than one on half of the cluster."""
    folder = workplace(tmp_path)
    cluster = describe(sshd, folder)
    more = '[[hosts]]\nssh = "127.0.0.2"\nname = "second"\npython = "/usr/bin/python3"\n'
    cluster.write_text(cluster.read_text() + more)
    done = shardbench(*RUN, "--cluster", cluster, cwd=folder)
    assert done.status == 2
    assert done.err.count("\n") == 1, done.err
    assert not (folder / "results").exists()
