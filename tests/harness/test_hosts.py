"""This machine as a host of jobs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from harness import procs
from harness.hosts import LocalHost


def test_old_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    """What a dead controller's job left goes after a day; what is younger, or has a living agent, stays."""
    host = LocalHost(root=tmp_path / "own" / "jobs")
    old, young, lives = (Path(host.create_job_dir(letter * 32)) for letter in "abc")
    lock = procs.take_lock(lives / "alive.lock")
    for jobdir in (old, lives):
        os.utime(jobdir, (0, time.time() - 25 * 3600))
    fourth = Path(host.create_job_dir("d" * 32))
    assert [path.exists() for path in (old, young, lives, fourth)] == [False, True, True, True]
    assert lock is not None
    os.close(lock)


def test_only_a_job_directory_of_this_host_is_removed(tmp_path: Path) -> None:
    """A wrong path is an error, not a deletion."""
    host = LocalHost(root=tmp_path / "own" / "jobs")
    jobdir = host.create_job_dir("a" * 32)
    for wrong in (tmp_path, tmp_path / "own", f"{jobdir}/rank-0", f"{jobdir}/../.."):
        with pytest.raises(ValueError, match="not a job directory"):
            host.remove(str(wrong))
    host.remove(jobdir)
    host.remove(jobdir)  # gone already: no error
    assert not Path(jobdir).exists()


def test_a_link_is_not_followed_when_evidence_is_collected(tmp_path: Path) -> None:
    """A rank can't have a file of the user's copied among the logs."""
    host = LocalHost(root=tmp_path / "own" / "jobs")
    jobdir = Path(host.create_job_dir("a" * 32))
    (tmp_path / "secret").write_text("s")
    (jobdir / "rank-0").mkdir()
    (jobdir / "rank-0" / "log").write_text("hello")
    (jobdir / "rank-0" / "link").symlink_to(tmp_path / "secret")
    (jobdir / "job.json").write_text("{}")
    host.collect(str(jobdir), tmp_path / "into")
    assert [str(p.relative_to(tmp_path / "into")) for p in sorted((tmp_path / "into").rglob("*"))] == [
        "rank-0",
        "rank-0/log",
    ]
