"""The BLAS that MLX multiplies dense float32 matrices with: a better one preloaded, and which one it really is.

    python -m harness.blas          what a rank started from here would be given, as JSON

MLX's Linux wheel bundles the reference BLAS, whose time grows with every row of a batch. `preload` returns the
environment that puts OpenBLAS (PyPI `scipy-openblas32`) in its place, through a shared library of three functions that is
compiled once per user. Macs need none of it: MLX uses Accelerate there, and Metal for nearly everything.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("blas_shim.c")
PACKAGE = "scipy-openblas32"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-shared", "-fPIC", "-Wall", "-Werror")
# Set by an administrator where OpenBLAS picks kernels that are wrong for the CPU; a rank whose environment is explicit
# must not lose it.
KEPT = "OPENBLAS_CORETYPE"
SHIM_PREFIX = "libshardbench-blas-"
BUILD_SECONDS = 60

# Run in a fresh process that has the shim preloaded: a 2 x 3 by 3 x 2 product through the symbol that MLX calls, found the
# way the dynamic linker finds it for MLX.
SELF_TEST = """
import ctypes
process = ctypes.CDLL(None)
before = process.shardbench_blas_calls()
a, b, c = (ctypes.c_float * 6)(1, 2, 3, 4, 5, 6), (ctypes.c_float * 6)(1, 2, 3, 4, 5, 6), (ctypes.c_float * 4)()
gemm = process.cblas_sgemm
gemm.argtypes = [ctypes.c_int] * 6 + [ctypes.c_float, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int,
                 ctypes.c_float, ctypes.c_void_p, ctypes.c_int]
gemm.restype = None
gemm(101, 111, 111, 2, 2, 3, 1.0, a, 3, b, 2, 0.0, c, 2)
assert list(c) == [22, 28, 49, 64], list(c)
assert process.shardbench_blas_calls() == before + 1
"""


class Unavailable(Exception):
    """Why no BLAS can be preloaded here, in one line."""


@dataclass(frozen=True)
class Preload:
    """What a rank's environment gets, or why it gets nothing: `env` is empty exactly when there is a `reason`."""

    env: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None

    def __post_init__(self) -> None:
        if bool(self.env) == bool(self.reason):
            raise ValueError("a preload has either an environment or a reason for none")


def preload(threads: int = 1) -> dict[str, str]:
    """Environment additions that give a rank OpenBLAS; empty where that cannot be had (`decide` says why).

    Args:
        threads: OpenBLAS threads per rank. More than one helps only when the ranks leave cores idle: they spin.
    """
    return dict(decide(threads).env)


def decide(threads: int = 1) -> Preload:
    """As `preload`, with the reason when nothing can be preloaded.

    Raises:
        ValueError: `threads` is less than one.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads}; a BLAS needs at least one")
    if sys.platform != "linux":
        return Preload(reason=f"MLX does not bundle a BLAS on {sys.platform}; nothing to replace")
    try:
        shim = _shim()
    except Unavailable as error:
        return Preload(reason=str(error))
    env = {"LD_PRELOAD": _with_preload(shim), "OPENBLAS_NUM_THREADS": str(threads)}
    if os.environ.get(KEPT):
        env[KEPT] = os.environ[KEPT]
    return Preload(env=env)


def loaded_blas() -> dict[str, Any]:
    """Which BLAS serves MLX in this process, by what the process has loaded; `name` is always there.

    `name` is "openblas", "reference", "accelerate", another library's file name, or "none" when MLX is not loaded. With
    the shim, also `version`, `source`, `core` (the CPU kernels in use), `threads` and `calls` (so far).
    """
    if sys.platform == "darwin":
        return {"name": "accelerate", "source": "macOS"}
    libraries = _mapped_libraries()
    shim = next((path for path in libraries if path.name.startswith(SHIM_PREFIX)), None)
    if shim is not None and str(shim) in os.environ.get("LD_PRELOAD", "").split(":"):
        return _describe_shim(shim)
    if not any(path.name.startswith("libmlx") for path in libraries):
        return {"name": "none", "source": "MLX is not loaded"}
    # MLX's own dependency lies beside it; other packages (numpy, scipy) bring a BLAS of their own that MLX never calls.
    for path in libraries:
        if "blas" in path.name and path.parent.name.startswith("mlx"):
            kind = "openblas" if _has(path, "openblas_get_config") else "reference"
            return {"name": kind, "source": "bundled with MLX", "library": path.name}
    linked = sorted(path.name for path in libraries if "blas" in path.name or "mkl" in path.name)
    return {"name": linked[0] if linked else "unknown", "source": "found on the system"}


def _describe_shim(shim: Path) -> dict[str, Any]:
    library = ctypes.CDLL(str(shim))
    library.shardbench_blas_config.restype = ctypes.c_char_p
    library.shardbench_blas_core.restype = ctypes.c_char_p
    library.shardbench_blas_calls.restype = ctypes.c_uint64
    config = library.shardbench_blas_config().decode()
    words = config.split()
    return {
        "name": words[0].lower(),  # the library speaks for itself: "OpenBLAS 0.3.34 ..."
        "version": words[1] if len(words) > 1 else None,
        "source": f"{PACKAGE} {metadata.version(PACKAGE)}, preloaded",
        "config": config,
        "core": library.shardbench_blas_core().decode(),
        "threads": int(library.shardbench_blas_threads()),
        "calls": int(library.shardbench_blas_calls()),
    }


def _mapped_libraries() -> list[Path]:
    """Shared libraries of this process, in the order of their addresses, each once."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    # Five columns, then the path, which may hold spaces.
    paths = [line.split(maxsplit=5)[5] for line in lines if line.count(" ") >= 5 and ".so" in line]
    return [Path(path) for path in dict.fromkeys(paths) if path.startswith("/")]


def _has(library: Path, symbol: str) -> bool:
    return hasattr(ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_LAZY), symbol)


def _with_preload(shim: Path) -> str:
    """The shim first, then whatever this process was itself started with."""
    others = [path for path in os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":") if path]
    return ":".join([str(shim), *(path for path in others if path != str(shim))])


def _shim() -> Path:
    """The compiled shim, built and tried on first use.

    Raises:
        Unavailable: the package or a compiler is missing, the build or its trial failed, or the cache is not private.
    """
    openblas = _openblas()
    text = SOURCE.read_bytes()
    # The library is found by its path, which the build writes into the shim: another environment needs another shim, and
    # so does another version in the same place.
    facts = openblas.stat()
    identity = [*FLAGS, str(openblas), str(facts.st_size), str(facts.st_mtime_ns)]
    digest = hashlib.sha256(text + b"\0" + "\0".join(identity).encode()).hexdigest()[:24]
    folder = _private_folder()
    shim = folder / f"{SHIM_PREFIX}{digest}.so"
    if any(mark in str(path) for path in (shim, openblas) for mark in " :$"):
        raise Unavailable(f"{shim.parent} or {openblas.parent} has a space, a colon or a $ in its path")
    if not _is_mine(shim, stat.S_ISREG):
        _build(shim, openblas)
    return shim


def _openblas() -> Path:
    spec = importlib.util.find_spec("scipy_openblas32")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("lib/libscipy_openblas*.so"))]
    if not found:
        raise Unavailable(f"the Python package {PACKAGE} is not installed")
    return found[0].resolve()


def _private_folder() -> Path:
    """The folder of built shims, ours alone: whoever can write there can run code in every rank."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base).absolute() / "shardbench" / "blas"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"cannot make the cache folder {folder}: {error.strerror}") from None
    if not _is_mine(folder, stat.S_ISDIR):
        raise Unavailable(f"the cache folder {folder} belongs to, or can be written by, somebody else")
    return folder


def _is_mine(path: Path, is_kind: Any) -> bool:
    """Whether `path` is there, itself of the kind asked for (no link), ours, and writable by nobody else."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return bool(is_kind(facts.st_mode)) and facts.st_uid == os.getuid() and not facts.st_mode & others


def _build(shim: Path, openblas: Path) -> None:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable(f"no C compiler ({', '.join(COMPILERS)}) to build the BLAS shim with")
    with tempfile.TemporaryDirectory(prefix=".build-", dir=shim.parent) as work:
        fresh = Path(work) / shim.name
        link = [str(openblas), f"-Wl,-rpath,{openblas.parent}"]
        _check("compiling", [compiler, *FLAGS, "-o", str(fresh), str(SOURCE), *link])
        fresh.chmod(0o700)
        env = {**os.environ, "LD_PRELOAD": _with_preload(fresh), "OPENBLAS_NUM_THREADS": "1"}
        _check("trying", [sys.executable, "-c", SELF_TEST], env)
        fresh.replace(shim)  # whole or not at all, also when two builds meet


def _check(doing: str, argv: list[str], env: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{doing} the BLAS shim failed: {type(error).__name__}") from None
    # The dynamic linker only warns when it cannot preload, and goes on without.
    if done.returncode != 0 or "cannot be preloaded" in done.stderr:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise Unavailable(f"{doing} the BLAS shim failed: {last}")


def main() -> int:
    """Print what a rank on this host would be given, and what this process has."""
    decision = decide()
    print(
        json.dumps({"env": dict(decision.env), "reason": decision.reason, "loaded": loaded_blas()}, indent=2)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
