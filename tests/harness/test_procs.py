"""Processes: found for certain, ended for certain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness import procs
from tests.harness.jobs import alive, wait_for

STUBBORN = (
    "import signal, time\n"
    "for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(n, signal.SIG_IGN)\n"
    "print('ready', flush=True)\ntime.sleep(600)\n"
)


@pytest.fixture
def stubborn() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ignores SIGTERM and has a nonce."""
    env = {**os.environ, "SHARDBENCH_NONCE": f"{os.getpid():032x}"}
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_is_found_by_its_nonce(stubborn: subprocess.Popen[bytes]) -> None:
    """Exactly the processes with that nonce in their environment are of the job."""
    assert [process.pid for process in procs.of_job(f"{os.getpid():032x}")] == [stubborn.pid]
    assert procs.of_job(f"{os.getpid() + 1:032x}") == []


def test_a_pid_that_is_used_again_is_another_process(stubborn: subprocess.Popen[bytes]) -> None:
    """Identity is pid and creation time: with another time it is not alive, and no signal reaches it."""
    identity = procs.ProcessId.of(stubborn.pid)
    assert identity is not None
    assert identity.alive()
    assert procs.ProcessId.read(identity.to_json()) == identity
    earlier = procs.ProcessId(stubborn.pid, identity.started - 60)
    assert not earlier.alive()
    earlier.send(signal.SIGKILL)
    assert not wait_for(lambda: stubborn.poll() is not None, 0.2)
    identity.send(signal.SIGKILL)
    assert wait_for(lambda: not identity.alive(), 5)  # a zombie until it is waited for: not alive
    assert psutil.Process(stubborn.pid).status() == psutil.STATUS_ZOMBIE


def test_a_stopped_process_that_ignores_sigterm_is_ended(stubborn: subprocess.Popen[bytes]) -> None:
    """TERM, then KILL, until it is gone; nothing survives, and nothing else is touched."""
    os.kill(stubborn.pid, signal.SIGSTOP)
    assert procs.end_all(lambda: procs.of_job(f"{os.getpid():032x}"), grace=0.2) == []
    assert stubborn.wait(5) == -signal.SIGKILL
    assert alive(os.getpid())


def test_survivors_are_reported_and_not_awaited_for_ever(stubborn: subprocess.Popen[bytes]) -> None:
    """What can't be ended (here: it only looks alive) is named when patience is at its end."""
    looks_alive = psutil.Process(stubborn.pid)
    stubborn.kill()
    stubborn.wait()
    assert procs.end_all(lambda: [looks_alive], grace=0.1, patience=0.2) == [stubborn.pid]


def test_a_lock_is_free_when_its_holder_is_killed(tmp_path: Path) -> None:
    """The lock lives exactly as long as the process that took it, however that ends."""
    path = tmp_path / "lock"
    assert not procs.lock_is_held(path)
    code = "import sys, pathlib, time\nfrom harness import procs\nassert procs.take_lock(pathlib.Path(sys.argv[1]))\n"
    code += "print('held', flush=True)\ntime.sleep(600)\n"
    env = {**os.environ, "PYTHONPATH": procs.python_path("")}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=env) as holder:
        assert holder.stdout
        holder.stdout.readline()
        assert procs.lock_is_held(path)
        assert procs.take_lock(path, patience=0) is None
        holder.kill()
    assert not procs.lock_is_held(path)
    assert procs.take_lock(path, patience=0) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_child_dies_with_its_parent() -> None:
    """Killed, the parent takes the child along, which has no part in it."""
    code = (
        "import subprocess, sys\nfrom harness import procs\n"
        "child = subprocess.Popen(['sleep', '600'], preexec_fn=procs.die_with_parent())\n"
        "print(child.pid, flush=True)\nchild.wait()\n"
    )
    env = {**os.environ, "PYTHONPATH": procs.python_path("")}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        parent.kill()
    assert wait_for(lambda: not alive(child), 5)


def test_python_path_finds_the_packages_first() -> None:
    """The tree that runs leads, whatever was there before stays, and nothing is named twice."""
    here, *rest = procs.python_path("/a:/b").split(os.pathsep)
    assert (Path(here) / "harness" / "procs.py").is_file()
    assert rest == ["/a", "/b"]
    assert procs.python_path(procs.python_path("")) == here
