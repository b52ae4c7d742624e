"""The conditions of a run: what has to stand beside a number for it to mean anything.

`collect` describes the machine that runs the command, `rank_view` what one rank sees. They can differ (a variable
that never reached the remote shell, another MLX on the second host), so a run keeps both and `differences` names
what the ranks don't agree on. Reading a file and understanding it are separate functions, so that Mac facts are
tested on Linux and the other way round.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

SCHEMA = 1
PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "numpy", "transformers", "asv", "shardbench")
# Anything else in the environment may be a secret and is none of our business.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# The facts of a rank's view that should be the same in every rank, and those in them that can't be.
SHARED = ("versions", "threads", "mlx_variables", "blas")
PLACE_VARIABLES = frozenset(
    {
        "MLX_RANK",
        "MLX_HOSTFILE",
        "MLX_IBV_DEVICES",
        "MLX_JACCL_COORDINATOR",
        "MLX_JACCL_RING",
        "MLX_MPI_LIBNAME",
    }
)
RANKS_OWN = PLACE_VARIABLES | {"calls"}
# What a variable of MLX is allowed to be called and still be recorded.
_MLX_VARIABLE = re.compile(r"MLX_[A-Z0-9_]+")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS", re.IGNORECASE)


def collect(root: Path | None = None, blas: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the environment record of this machine.

    Args:
        root: the project's folder, whose commit the numbers belong to; by default the one this package lies in.
        blas: what `harness.blas.loaded_blas` said in a rank; by default asked in this process, which need not
            have loaded the BLAS that a rank has.
    """
    return {
        "schema": SCHEMA,
        "collected": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "state": state(),
        "git": git_state(root or Path(__file__).resolve().parent.parent),
        "ranks": [],
        **_process_facts(blas),
    }


def rank_view(blas: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what this process, a rank, sees of its environment: versions, BLAS, threads, MLX_* variables, device."""
    rank, world = os.environ.get("SHARDBENCH_RANK"), os.environ.get("SHARDBENCH_RANKS")
    return {
        "host": platform.node(),
        "rank": f"{rank} of {world}" if rank and world else None,
        "device": _device(),
        "machine": machine(),
        **_process_facts(blas),
    }


def with_ranks(environment: Mapping[str, Any], views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the environment record with the ranks' views in it.

    The BLAS, threads and MLX_* variables at the top of the record become those of the ranks where all agree, since
    a rank is what was timed; where they differ, `rank_differences` says so.
    """
    merged = {**environment, "ranks": [dict(view) for view in views], "rank_differences": differences(views)}
    for name in SHARED:
        seen = [_settings(view, name) for view in views]
        if seen and seen[0] and all(value == seen[0] for value in seen):
            # A rank need not have every package that the controller has: its versions add to the record's.
            merged[name] = {**(environment.get(name) or {}), **seen[0]} if name == "versions" else seen[0]
    return merged


def differences(views: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each fact on which ranks differ and should not."""
    found = []
    for name in SHARED:
        seen = [_settings(view, name) for view in views]
        for key in sorted({key for settings in seen for key in settings}):
            # One mention a value: a run has the views of many jobs.
            holders: dict[str, str] = {}
            for number, (view, settings) in enumerate(zip(views, seen, strict=True)):
                holders.setdefault(str(settings.get(key)), f"rank {view.get('rank') or number}")
            if len(holders) > 1:
                shown = ", ".join(f"{holder}: {value}" for value, holder in holders.items())
                found.append(f"{name.replace('_', ' ')}: {key} ({shown})")
    return found


def notes(environment: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each condition that a reader of the numbers must know."""
    found = []
    blas = environment.get("blas") or {}
    if blas.get("name") == "reference":
        found.append(
            "MLX used the reference BLAS: its time grows with every row of a batch, so batching saves nothing here"
        )
    load, cores = (
        (environment.get("state") or {}).get("load"),
        (environment.get("machine") or {}).get("cores"),
    )
    if load and cores and load[0] > cores / 2:
        found.append(f"the machine was busy before the run began: load {load[0]:.1f} on {cores} cores")
    git = environment.get("git") or {}
    if git.get("dirty"):
        found.append(f"the code had changes that are not in commit {str(git.get('commit'))[:8]}")
    power = (environment.get("state") or {}).get("power") or {}
    if power.get("source") == "battery":
        found.append("the machine ran on its battery")
    thermal = (environment.get("state") or {}).get("thermal") or {}
    if isinstance(thermal.get("cpu_speed_limit"), int) and thermal["cpu_speed_limit"] < 100:
        found.append(f"the machine held its CPU at {thermal['cpu_speed_limit']} % to cool down")
    found += [f"ranks differ in {difference}" for difference in environment.get("rank_differences") or []]
    return found


def _settings(view: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the part `name` of a rank's view without what is the rank's own."""
    return {key: value for key, value in (view.get(name) or {}).items() if key not in RANKS_OWN}


def machine() -> dict[str, Any]:
    """Return what doesn't change from run to run: name, OS, chip, cores, memory in bytes."""
    system = platform.system()
    release = f"macOS {platform.mac_ver()[0]}" if system == "Darwin" else f"{system} {platform.release()}"
    facts: dict[str, Any] = {
        "name": platform.node(),
        "os": release,
        "arch": platform.machine(),
        "chip": _chip(system),
        "cores": os.cpu_count(),
        "cores_usable": _usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
    }
    if system == "Darwin":
        performance = _output(["/usr/sbin/sysctl", "-n", "hw.perflevel0.physicalcpu"])
        facts["cores_performance"] = int(performance) if performance.isdigit() else None
    return facts


def state() -> dict[str, Any]:
    """Return what changes: load, free memory in bytes, power and thermal facts where the system tells them."""
    return {
        "load": [round(value, 2) for value in os.getloadavg()],
        "memory_available_bytes": psutil.virtual_memory().available,
        "power": _power(),
        "thermal": _thermal(),
    }


def git_state(root: Path) -> dict[str, Any]:
    """Return commit, commit time (seconds), branch and whether tracked files outside results/ were changed.

    Without a repository whose top folder is `root` (an installed package, a folder without git) the commit is None and
    `note` says why.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return {"commit": None, "note": "the code that ran is not a git clone of the project"}
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return {"commit": None, "note": "the project's repository has no commit yet"}
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
    seconds = _git(root, "show", "-s", "--format=%ct", commit)
    return {
        "commit": commit,
        "commit_time": int(seconds) if seconds else None,
        "branch": _git(root, "rev-parse", "--abbrev-ref", "HEAD"),
        # An unreadable status counts as changed: a number must not pass for the commit's without proof.
        "dirty": changes is None or bool(changes),
    }


def mlx_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the MLX_* variables of an environment, those aside whose name speaks of a secret."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if _MLX_VARIABLE.fullmatch(name) and not _SECRET.search(name)
    }


def thread_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that say how many threads a matrix product may use."""
    return {name: variables[name] for name in THREAD_VARIABLES if name in variables}


def cpu_model(cpuinfo: str) -> str | None:
    """Return the processor's name from the text of Linux's /proc/cpuinfo."""
    found = re.search(r"^(?:model name|Hardware|Model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found.group(1).strip() if found else None


def thermal_limits(pmset: str) -> dict[str, Any]:
    """Return the limits from the output of macOS's `pmset -g therm`, in percent; {} when it records none."""
    found = re.findall(r"(CPU_Scheduler_Limit|CPU_Available_CPUs|CPU_Speed_Limit)\s*=\s*(\d+)", pmset)
    return {name.lower(): int(value) for name, value in found}


def power_mode(pmset: str) -> dict[str, Any]:
    """Return `low_power_mode` or `power_mode` from the output of macOS's `pmset -g`."""
    found = re.findall(r"^\s*(lowpowermode|powermode)\s+(\d+)", pmset, re.MULTILINE)
    names = {"lowpowermode": "low_power_mode", "powermode": "power_mode"}
    return {names[name]: int(value) for name, value in found}


def version(package: str) -> str | None:
    """Return the installed version of `package` without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _process_facts(blas: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "blas": dict(blas) if blas is not None else _loaded_blas(),
        "threads": thread_variables(os.environ),
        "mlx_variables": mlx_variables(os.environ),
    }


def _loaded_blas() -> dict[str, Any]:
    from harness import blas

    return dict(blas.loaded_blas())


def _device() -> str | None:
    """Return MLX's default device in a process that has MLX loaded; asking must not load it."""
    core = sys.modules.get("mlx.core")
    return str(core.default_device()) if core is not None else None


def _usable_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _chip(system: str) -> str | None:
    if system == "Darwin":
        return _output(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]) or None
    return cpu_model(_text(Path("/proc/cpuinfo"))) or platform.processor() or None


def _power() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if battery is not None:
        facts["source"] = "mains" if battery.power_plugged else "battery"
    if sys.platform == "darwin":
        facts.update(power_mode(_output(["/usr/bin/pmset", "-g"])))
    else:
        governor = _text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")).strip()
        if governor:
            facts["governor"] = governor
    return facts


def _thermal() -> dict[str, Any]:
    if sys.platform == "darwin":
        return thermal_limits(_output(["/usr/bin/pmset", "-g", "therm"]))
    count = _text(Path("/sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count")).strip()
    return {"package_throttle_count": int(count)} if count.isdigit() else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _output(argv: list[str]) -> str:
    """Return the output of a short command, or "" when it fails: a missing fact must not stop a run."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _git(root: Path, *arguments: str) -> str | None:
    # Inside a git hook, GIT_DIR and its kin name another repository than `root`.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    argv = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False, env=variables)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
