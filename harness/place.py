"""Where a command runs its jobs: this machine, or the head of a cluster."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.errors import UsageError
from harness.hosts import Host, LocalHost
from sharding import rows


def machine_memory() -> int:
    """Bytes that models may use on this machine: Metal's own recommendation, or the physical memory."""
    return rows.memory_of_device() or int(psutil.virtual_memory().total)


@dataclass(frozen=True)
class Place:
    """Where jobs run and what they may use.

    Attributes:
        host: This machine or a remote one.
        env: Environment of the ranks beyond the host's own (threads, a preloaded BLAS).
        memory: Bytes that all ranks of the host may use together.
        path: Folders that ranks add to Python's path, for users' own strategies.
    """

    host: Host
    env: Mapping[str, str]
    memory: int
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Here:
    """Where a command runs its jobs, and what its records say of that."""

    place: Place
    cluster: dict[str, Any] | None


@contextmanager
def place(cluster: Path | None) -> Iterator[Here]:
    """This machine, or the head of a cluster, connected."""
    from harness import blas

    if cluster is None:
        env = rank_environment(blas.preload())
        yield Here(Place(LocalHost(), env, machine_memory(), (os.getcwd(),)), None)
        return
    from harness.cluster import load_cluster
    from harness.remote import SshHost

    described = load_cluster(cluster)
    if len(described.hosts) > 1:
        raise UsageError(
            f"{cluster}: {len(described.hosts)} hosts; this release runs all ranks on one host, list only that one"
        )
    with SshHost(described.head_host) as host:
        memory = int(host.facts.get("memory") or 0) or machine_memory()
        env = {**rank_environment({}), **host.env}
        facts = {"name": described.name, "hosts": [described.head]}
        yield Here(Place(host, env, memory), facts)


def threads(count: int) -> dict[str, str]:
    """Environment that gives each BLAS so many threads."""
    return dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), str(count))


def rank_environment(preload: Mapping[str, str]) -> dict[str, str]:
    """Environment of a rank here: one BLAS thread, since ranks share the cores, and the preloaded BLAS."""
    kept = {
        name: os.environ[name] for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if name in os.environ
    }
    # MLX's CPU backend compiles fused functions with g++; without one they must run unfused.
    unfused = {"MLX_DISABLE_COMPILE": "1"} if sys.platform == "linux" and shutil.which("g++") is None else {}
    return {**kept, **unfused, **preload, **threads(1), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
