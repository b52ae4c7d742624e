"""The preloaded BLAS: built privately, really called by MLX, right, and honest about what is loaded."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import blas

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="only MLX's Linux wheel bundles a BLAS to replace"
)
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in blas.COMPILERS), reason="no C compiler to build the shim with"
)

# Two products in MLX, with numpy's answer and the process's own account of its BLAS before and after.
PROBE = """
import json
import mlx.core as mx, numpy as np
from harness import blas
before = blas.loaded_blas()
rng = np.random.default_rng(7)
errors = []
for rows, inner, columns in ((16, 512, 1024), (1, 300, 77)):
    x = rng.standard_normal((rows, inner), dtype=np.float32)
    w = rng.standard_normal((columns, inner), dtype=np.float32)
    got = np.array(mx.array(x) @ mx.array(w).T)
    bound = np.abs(x).astype(np.float64) @ np.abs(w.T).astype(np.float64)
    errors.append(float((np.abs(got - x.astype(np.float64) @ w.T.astype(np.float64)) / bound).max()))
print(json.dumps({"before": before, "after": blas.loaded_blas(), "errors": errors}))
"""


def probe(env: dict[str, str]) -> dict[str, Any]:
    """Run PROBE in a process whose environment is this one's, without any preload, plus `env`."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LD_PRELOAD", "OPENBLAS_NUM_THREADS")
    }
    root = str(Path(blas.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**clean, "PYTHONPATH": root, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot be preloaded" not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own, and no preload inherited."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return tmp_path / "cache"


@linux_only
@needs_compiler
def test_preloaded_openblas_is_what_mlx_calls_and_is_right(cache: Path) -> None:
    """With the preload MLX's float32 products go through the shim and equal numpy's to float32 rounding."""
    found = probe(blas.preload(threads=1))
    assert found["before"]["name"] == "openblas"
    assert found["before"]["calls"] == 0
    assert found["after"]["calls"] >= 2
    assert found["after"]["threads"] == 1
    assert max(found["errors"]) < 1e-6  # of |x| @ |w|: a dozen float32 roundings


@linux_only
def test_without_preload_the_bundled_blas_is_named() -> None:
    """A process without the preload says that MLX uses its own reference BLAS, and says nothing of the shim."""
    found = probe({})
    assert found["after"]["name"] == "reference"
    assert found["after"]["source"] == "bundled with MLX"
    assert "calls" not in found["after"]


@linux_only
@needs_compiler
def test_shim_is_private_and_built_once(cache: Path) -> None:
    """The shim and its folder belong to the user alone, and a second call uses the same file."""
    first = blas.preload()["LD_PRELOAD"]
    stamp = Path(first).stat().st_mtime_ns
    assert blas.preload()["LD_PRELOAD"] == first
    assert Path(first).stat().st_mtime_ns == stamp
    assert Path(first).is_relative_to(cache)
    for path in (Path(first), Path(first).parent):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert [path.name for path in Path(first).parent.iterdir()] == [Path(first).name]


@linux_only
@needs_compiler
def test_folder_that_others_can_write_is_refused(cache: Path) -> None:
    """Nothing is loaded from a cache folder in which somebody else could have put it."""
    folder = Path(blas.preload()["LD_PRELOAD"]).parent
    folder.chmod(0o777)
    decision = blas.decide()
    assert decision.env == {}
    assert "somebody else" in (decision.reason or "")


@linux_only
@needs_compiler
def test_link_in_place_of_the_shim_is_not_followed(cache: Path, tmp_path: Path) -> None:
    """A symbolic link where the shim should be is replaced by a freshly built shim."""
    shim = Path(blas.preload()["LD_PRELOAD"])
    other = tmp_path / "other.so"
    shim.rename(other)
    shim.symlink_to(other)
    assert blas.preload()["LD_PRELOAD"] == str(shim)
    assert not shim.is_symlink()


@linux_only
def test_without_a_compiler_there_is_a_reason_and_no_environment(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no compiler is found nothing is preloaded, and the reason names the compilers looked for."""
    monkeypatch.setattr(blas.shutil, "which", lambda name: None)
    assert blas.preload() == {}
    assert "no C compiler (cc, gcc, clang)" in (blas.decide().reason or "")


@linux_only
@needs_compiler
def test_source_that_does_not_compile_is_a_reason(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed build is one line of reason and leaves nothing in the cache."""
    broken = tmp_path / "broken.c"
    broken.write_text("int f(void) { return missing; }\n")
    monkeypatch.setattr(blas, "SOURCE", broken)
    reason = blas.decide().reason or ""
    assert reason.startswith("compiling the BLAS shim failed")
    assert "\n" not in reason
    assert list((cache / "shardbench" / "blas").iterdir()) == []


@linux_only
@needs_compiler
def test_shim_that_computes_wrongly_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shim whose product is wrong fails its trial, is not kept, and the reason says so."""
    wrong = tmp_path / "wrong.c"
    right = blas.SOURCE.read_text()
    wrong.write_text(right.replace("scipy_cblas_sgemm(GEMM_VALUES);", "(void)0;", 1))
    assert wrong.read_text() != right
    monkeypatch.setattr(blas, "SOURCE", wrong)
    monkeypatch.setattr(blas, "FLAGS", tuple(flag for flag in blas.FLAGS if not flag.startswith("-W")))
    decision = blas.decide()
    assert decision.env == {}
    assert (decision.reason or "").startswith("trying the BLAS shim failed")
    assert list((cache / "shardbench" / "blas").iterdir()) == []


@linux_only
@needs_compiler
def test_inherited_settings_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The administrator's kernel choice and an earlier preload reach the rank; the threads are the caller's."""
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    shim = blas.preload()["LD_PRELOAD"]
    monkeypatch.setenv("LD_PRELOAD", f"/lib/other.so {shim}")
    env = blas.preload(threads=2)
    assert env == {
        "LD_PRELOAD": f"{shim}:/lib/other.so",
        "OPENBLAS_NUM_THREADS": "2",
        "OPENBLAS_CORETYPE": "Haswell",
    }


@linux_only
@needs_compiler
def test_path_that_the_linker_would_split_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache whose path holds a space is refused, since LD_PRELOAD would be read as two libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    assert "has a space" in (blas.decide().reason or "")


@pytest.mark.skipif(sys.platform == "linux", reason="the answer of other systems")
def test_elsewhere_nothing_is_preloaded() -> None:
    """On a Mac no environment is added and the BLAS is Accelerate."""
    assert blas.preload() == {}
    assert blas.loaded_blas()["name"] == "accelerate"


def test_states_that_make_no_sense_cannot_be_built() -> None:
    """A decision has an environment or a reason, never both or neither; a BLAS has at least one thread."""
    with pytest.raises(ValueError, match="either"):
        blas.Preload()
    with pytest.raises(ValueError, match="either"):
        blas.Preload(env={"A": "b"}, reason="none")
    with pytest.raises(ValueError, match="threads is 0"):
        blas.preload(threads=0)
