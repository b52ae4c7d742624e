"""The files of a job: what is accepted, and how it is written."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import procs, protocol

JOB: dict[str, Any] = {
    "nonce": "0123456789abcdef0123456789abcdef", "ranks": 2, "backend": "mpi", "python": "/usr/bin/python3",
    "argv": ("-m", "harness.worker"), "deadline_seconds": 60.0, "stall_seconds": 5.0, "env": {"A": "b"}, "work": {"n": 1},
}  # fmt: skip


def test_a_job_reads_back_as_it_was_written(tmp_path: Path) -> None:
    """`job.json` holds the whole request."""
    job = protocol.Job(**JOB)
    protocol.write_atomic(tmp_path / "job.json", job.to_json())
    assert protocol.Job.load(tmp_path) == job
    assert json.loads((tmp_path / "job.json").read_bytes())["version"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"nonce": "x"}, {"ranks": 0}, {"ranks": True, "backend": "none", "nonce": 3}, {"ranks": "2"},
        {"backend": "jaccl"}, {"backend": "none"}, {"python": "python3"}, {"argv": ()}, {"deadline_seconds": -1},
        {"stall_seconds": float("nan")}, {"env": {"1A": "x"}}, {"env": {"A": "\0"}}, {"env": {"A": 1}}, {"surplus": 1},
    ],
)  # fmt: skip
def test_a_job_in_a_bad_state_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """A field that is out of range or unknown is a ValueError, before any process is started."""
    (tmp_path / "job.json").write_text(json.dumps({**JOB, **change}))
    with pytest.raises(ValueError, match=r"\S"):
        protocol.Job.load(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"nonce": 1}', "null"])
def test_what_is_no_job_is_refused(text: str, tmp_path: Path) -> None:
    """A torn or foreign file is a ValueError too."""
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(ValueError, match=r"\S"):
        protocol.Job.load(tmp_path)


def test_a_killed_writer_leaves_the_old_file_whole(tmp_path: Path) -> None:
    """A process killed amid many rewrites leaves one of its versions, never a part of one."""
    path = tmp_path / "record.json"
    protocol.write_record(path, {"n": -1, "text": ""})
    code = (
        "import sys, pathlib\nfrom harness import protocol\nprint('go', flush=True)\n"
        "for n in range(10**9): protocol.write_record(pathlib.Path(sys.argv[1]), {'n': n, 'text': 'x' * 100_000})\n"
    )
    env = {**os.environ, "PYTHONPATH": procs.python_path("")}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=env) as writer:
        assert writer.stdout
        writer.stdout.readline()
        for _ in range(200):
            record = protocol.read_record(path)
            assert record is not None
            assert len(record["text"]) in (0, 100_000)
        writer.kill()
    record = protocol.read_record(path)
    assert record is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_unreadable_record_is_none(tmp_path: Path) -> None:
    """No file, half a file and a list are no record."""
    assert protocol.read_record(tmp_path / "none") is None
    for text in ('{"a": 1', "[1]", ""):
        (tmp_path / "x").write_text(text)
        assert protocol.read_record(tmp_path / "x") is None


def test_a_private_folder_is_refused_when_it_is_not_private(tmp_path: Path) -> None:
    """A link or a folder that others may write to is not used, whoever put it there."""
    assert stat.S_IMODE(protocol.private_folder(tmp_path / "a" / "b").stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("link", "open"):
        with pytest.raises(PermissionError, match=name):
            protocol.private_folder(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one\ntwo\n\n  \n", "two"),
        ("ValueError: no\n--------\n", "ValueError: no"),
        ("\x1b[31mred\x1b[0m \x07bell\n", "red  bell"),
        ("10%\r20%\r", "20%"),
        ("", ""),
        ("x" * 400, "x" * 299 + "…"),
        ("ü\u2028next", "ü next"),
    ],
)
def test_the_last_line_of_a_log_is_one_clean_line(text: str, line: str, tmp_path: Path) -> None:
    """It goes into a reason: no control characters, not endless, and something that says something."""
    (tmp_path / "log").write_text(text)
    assert protocol.last_line(tmp_path / "log") == line


def test_the_last_line_of_what_is_no_text_or_no_file(tmp_path: Path) -> None:
    """Undecodable bytes are replaced; a missing log says nothing."""
    (tmp_path / "log").write_bytes(b"\xff\xfe ok \xc3\n")
    assert "ok" in protocol.last_line(tmp_path / "log")
    assert protocol.last_line(tmp_path / "none") == ""


def test_signal_names() -> None:
    """A signal is named as the system names it; an unknown one by its number."""
    assert protocol.signal_name(signal.SIGKILL) == "SIGKILL"
    assert protocol.signal_name(250) == "signal 250"
