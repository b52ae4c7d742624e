"""How the N supervisors of a job are started: by mlx.launch over mpi or ring, or directly when there is one rank.

What is known of mlx.launch 0.32.4 and worked around here:
- its status says nothing (0 whatever its ranks did), and killed it leaves them running: neither is relied on;
- one rank over ring fails, so one rank goes without it;
- its default port is the same for every job, so each job gets its own;
- `--backend mpi` ignores `--python`, so the interpreter is part of the command;
- it finds mpirun and ompi_info by PATH, where an older system one may come first: the interpreter's own folder leads;
- over ring it spins a core as long as its ranks run, so the agent stops it (SIGSTOP) when all have started; with a
  standard input at its end it would spin even more, so it gets a pipe that stays open and empty;
- it leaves temporary files behind, and its script does not quote their names: they go to a folder made for them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness import ports, procs, protocol


@dataclass
class Launcher:
    """The process that starts the supervisors: mlx.launch, or the one supervisor itself."""

    process: subprocess.Popen[bytes]
    identity: procs.ProcessId
    scratch: Path
    ports: ports.Ports | None
    stopped: bool = False
    used: dict[procs.ProcessId, float] = field(default_factory=dict)  # CPU seconds, as last seen

    def meter(self) -> None:
        """From now on count mpirun as well, if mlx.launch has started one."""
        self.used.setdefault(self.identity, 0.0)
        with procs.gone_is_fine():
            for child in psutil.Process(self.identity.pid).children(recursive=True):
                if child.name() in ("mpirun", "prterun", "prte"):
                    self.used.setdefault(procs.ProcessId(child.pid, child.create_time()), 0.0)

    def measure(self) -> None:
        """Look again what the counted processes themselves, without their ranks, have used; what ended keeps its last."""
        for identity in self.used:
            process = identity.process()
            with procs.gone_is_fine():
                if process is not None:
                    times = process.cpu_times()
                    self.used[identity] = times.user + times.system

    @property
    def cpu_seconds(self) -> float | None:
        """CPU seconds of mlx.launch and mpirun so far; None before anything was counted."""
        return round(sum(self.used.values()), 3) if self.used else None


def scratch_folder(jobdir: Path) -> Path:
    """A private folder for temporary files, whose path needs no quoting in a shell (mlx.launch does not quote it)."""
    inside = jobdir / "tmp"
    if re.fullmatch(r"[A-Za-z0-9_./+-]+", str(inside)):
        inside.mkdir(mode=0o700, exist_ok=True)
        return inside
    return Path(tempfile.mkdtemp(prefix="shardbench-", dir="/tmp"))


def environment(
    job: protocol.Job, jobdir: Path, scratch: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The environment of mlx.launch and the supervisors; a rank's own is made from it by its supervisor."""
    env = {k: v for k, v in inherited.items() if not protocol.LAUNCHER_VARIABLES.fullmatch(k)}
    env |= {
        protocol.ENV_NONCE: job.nonce,
        protocol.ENV_JOBDIR: str(jobdir),
        "TMPDIR": str(scratch),
        "PATH": os.pathsep.join([str(Path(job.python).parent), env.get("PATH") or os.defpath]),
        "PYTHONPATH": procs.python_path(env.get("PYTHONPATH", "")),
    }
    if job.backend == "mpi":
        # After one rank failed, mpirun ends the other supervisors: give them time to end their rank and record it.
        env["PRTE_MCA_odls_base_sigkill_timeout"] = "10"
        if os.getuid() == 0:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env


def command(job: protocol.Job, jobdir: Path, base_port: int | None) -> list[str]:
    """The argv that starts one supervisor per rank."""
    supervise = [job.python, "-m", "harness.supervise", str(jobdir)]
    if job.ranks == 1:
        return supervise
    script = Path(job.python).parent / "mlx.launch"
    start = [str(script)] if script.exists() else ["-c", _MAIN]
    options = ["--backend", job.backend, "--repeat-hosts", str(job.ranks), "--hosts", "127.0.0.1"]
    if job.backend == "ring":
        options += ["--starting-port", str(base_port)]
    else:
        mca = ["--bind-to none", "--map-by :OVERSUBSCRIBE"]
        if job.ranks > usable_cores():
            mca.append(
                "--mca mpi_yield_when_idle 1"
            )  # else a rank that waits keeps the core of one that computes
        options += [f"--mpi-arg={arg}" for arg in mca]
    return [job.python, *start, *options, "--", *supervise]


_MAIN = "import sys; sys.argv[0] = 'mlx.launch'; from mlx._distributed_utils.launch import main; main()"


def usable_cores() -> int:
    """The cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start(job: protocol.Job, jobdir: Path, scratch: Path) -> Launcher:
    """Start the supervisors; OSError when that is impossible (no interpreter, no free ports)."""
    env = environment(job, jobdir, scratch, os.environ)
    if job.backend == "mpi" and job.ranks > 1 and not shutil.which("mpirun", path=env["PATH"]):
        raise FileNotFoundError(
            f"no mpirun beside {job.python} or on PATH: install openmpi there, or use ring"
        )
    reserved = ports.reserve(job.ranks) if job.backend == "ring" and job.ranks > 1 else None
    with (jobdir / protocol.LAUNCHER_LOG).open("ab") as log:
        process = subprocess.Popen(
            command(job, jobdir, reserved.base if reserved else None),
            cwd=jobdir,
            env=env,
            stdin=subprocess.PIPE,  # never written to, never closed: see above
            stdout=log,
            stderr=log,
            start_new_session=True,
            # The supervisor of a single rank must outlive this process to record how its rank ended.
            preexec_fn=procs.die_with_parent() if job.ranks > 1 else None,  # noqa: PLW1509 - one thread
        )
    identity = procs.ProcessId.of(process.pid) or procs.ProcessId(process.pid, 0.0)
    protocol.write_record(jobdir / protocol.LAUNCHER, {**identity.to_json(), "scratch": str(scratch)})
    return Launcher(process, identity, scratch, reserved)
