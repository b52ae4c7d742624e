"""What ranks do besides computing: prove who they are, and share compiled kernels without sharing broken ones."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from harness import exchange, jit, protocol, worker
from harness.exchange import WrongJobError
from harness.rank import RankContext
from harness.supervise import Supervisor
from harness.wakeup import Wakeup
from harness.work.base import prompt_of
from sharding.errors import BadRequest

NONCE = "a" * 32


def context(tmp_path: Path, rank: int = 0, ranks: int = 2, **work: Any) -> RankContext:
    """A rank's, without a supervisor."""
    return RankContext(rank, ranks, NONCE, "mpi" if ranks > 1 else "none", tmp_path, work)


class Wire:
    """A group of which the answers are made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, size: int, answer: Any = None) -> None:
        group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
        self.sent: list[Any] = []

        def init(*, strict: bool, backend: str) -> Any:
            assert strict  # or a rank without peers is a world of its own
            return group

        def all_gather(x: mx.array, group: Any = None) -> mx.array:
            self.sent.append(x.tolist())
            return mx.array(answer if answer is not None else x.tolist() * size)

        monkeypatch.setattr(mx.distributed, "init", init)
        monkeypatch.setattr(mx.distributed, "all_gather", all_gather)


def test_one_rank_needs_no_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone there is nobody to be mistaken about, and nothing is started."""
    monkeypatch.setattr(mx.distributed, "init", lambda **_: pytest.fail("no backend is needed"))
    group = exchange.connect(context(tmp_path, ranks=1))
    assert (group.rank(), group.size()) == (0, 1)
    assert exchange.any_rank(group, True)
    assert not exchange.any_rank(group, False)
    assert exchange.equal(group, "x")


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 4), (1, 2)])
def test_another_world_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    """The backend must say what the job says: N ranks that each compute alone would look N times as fast."""
    Wire(monkeypatch, rank, size)
    with pytest.raises(WrongJobError, match=f"rank {rank} of {size}"):
        exchange.connect(context(tmp_path))


def test_ranks_of_another_job_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank hands in its number and its job's nonce; who answers with others is not of this job."""
    honest = Wire(monkeypatch, 0, 2, [[0, 5], [1, 5]])
    with pytest.raises(WrongJobError):
        exchange.connect(context(tmp_path))
    mine = honest.sent[0][0][1]
    for answer in ([[0, mine], [0, mine]], [[0, mine], [1, mine + 1]], [[1, mine], [0, mine]], [[0, mine]]):
        Wire(monkeypatch, 0, 2, answer)
        with pytest.raises(WrongJobError, match="not 2 ranks of one job"):
            exchange.connect(context(tmp_path))
    Wire(monkeypatch, 0, 2, [[0, mine], [1, mine]])
    assert exchange.connect(context(tmp_path)).size() == 2


def test_texts_are_compared_over_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal on all or not; numbers that stand for them fit into what is sent."""
    Wire(monkeypatch, 0, 2)
    group = exchange.mx.distributed.init(strict=True, backend="mpi")
    assert exchange.equal(group, "same")
    Wire(monkeypatch, 0, 2, [1, 2])
    assert not exchange.equal(group, "same")


def test_a_model_that_cannot_be_built_has_a_status_and_a_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The judge quotes a log's last line: it is the refusal itself, without a traceback."""

    class Refuses:
        def __init__(self, _: RankContext) -> None:
            raise BadRequest("no such weights")

    monkeypatch.setitem(worker.KINDS, "reference", Refuses)
    assert worker.main(context(tmp_path, kind="reference")) == worker.REFUSED != 0
    assert capsys.readouterr().err == "no such weights\n"


def test_prompts_are_the_same_everywhere_and_differ_by_repeat() -> None:
    """Ranks and reference make them from the job alone; from a text exactly so many ids are taken."""
    work = {"vocabulary": 128, "source": {"seed": 3}, "prompt_ids": None}
    first, again = prompt_of(work, 2, 9), prompt_of(work, 2, 9)
    assert first.shape == (2, 9)
    assert bool(mx.array_equal(first, again).item())
    assert not bool(mx.array_equal(first, prompt_of(work, 2, 9, repeat=1)).item())
    assert not bool(mx.array_equal(first, prompt_of({**work, "source": {"seed": 4}}, 2, 9)).item())
    text = {**work, "prompt_ids": [5, 6, 7, 8]}
    assert prompt_of(text, 2, 6).tolist() == [[5, 6, 7, 8, 5, 6], [7, 8, 5, 6, 7, 8]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of kernels of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shardbench" / "kernels"


def kernel(scratch: Path, name: str = "0.1/cpu/k.so", text: str = "whole") -> Path:
    """A kernel as MLX would leave it in a rank's TMPDIR."""
    path = scratch / jit.KERNELS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_kernel_of_one_job_is_there_in_the_next(tmp_path: Path, cache: Path) -> None:
    """What a rank gave back, every later rank finds where MLX looks, and nobody else may write there."""
    jit.lend(tmp_path / "first")
    assert list((tmp_path / "first").rglob("*.so")) == []
    kernel(tmp_path / "first")
    jit.give_back(tmp_path / "first")
    assert cache.stat().st_mode & 0o777 == 0o700
    for name in ("second", "third"):
        jit.lend(tmp_path / name)
        assert (tmp_path / name / jit.KERNELS / "0.1/cpu/k.so").read_text() == "whole"


def test_ranks_do_not_see_each_others_unfinished_kernels(tmp_path: Path, cache: Path) -> None:
    """Two ranks of a job compile the same function at once: each in a folder of its own, and neither the other's."""
    for name in ("rank-0", "rank-1"):
        jit.lend(tmp_path / name)
    kernel(tmp_path / "rank-0", text="hal")
    assert list((tmp_path / "rank-1").rglob("*.so")) == []
    jit.lend(tmp_path / "another job's")
    assert list((tmp_path / "another job's").rglob("*.so")) == []
    kernel(tmp_path / "rank-1", text="whole")
    jit.give_back(tmp_path / "rank-1")
    jit.give_back(tmp_path / "rank-0")
    assert (cache / "0.1/cpu/k.so").read_text() == "whole"


def test_a_rank_that_compiles_anew_leaves_the_store_as_it_is(tmp_path: Path, cache: Path) -> None:
    """A file is replaced, not written into: what was lent to others must not change under them."""
    kernel(tmp_path / "first")
    jit.give_back(tmp_path / "first")
    jit.lend(tmp_path / "second")
    lent = tmp_path / "second" / jit.KERNELS / "0.1/cpu/k.so"
    fresh = lent.with_name("new")
    fresh.write_text("other")
    os.replace(fresh, lent)
    assert (cache / "0.1/cpu/k.so").read_text() == "whole"


def test_links_are_not_followed(tmp_path: Path, cache: Path) -> None:
    """A link in a rank's folder brings nothing from elsewhere into the store."""
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "rank" / jit.KERNELS
    folder.mkdir(parents=True)
    (folder / "k.so").symlink_to(tmp_path / "secret")
    jit.give_back(tmp_path / "rank")
    assert not cache.exists() or list(cache.rglob("*")) == []


def test_without_a_usable_store_ranks_compile_for_themselves(tmp_path: Path, cache: Path) -> None:
    """A store that others could write to is not used: a rank runs what lies there."""
    cache.mkdir(parents=True)
    (cache / "k.so").write_text("someone's")
    cache.chmod(0o777)
    jit.lend(tmp_path / "rank")
    assert list((tmp_path / "rank").rglob("*.so")) == []
    kernel(tmp_path / "rank")
    jit.give_back(tmp_path / "rank")
    assert [path.name for path in cache.iterdir()] == ["k.so"]


@pytest.mark.parametrize(("status", "kept"), [(0, True), (7, False)])
def test_only_a_rank_that_ended_well_gives_back(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, status: int, kept: bool
) -> None:
    """What a rank that crashed has compiled may be half a library: it goes with the rank."""
    code = (
        "import os, pathlib; d = pathlib.Path(os.environ['TMPDIR']) / 'mlx'; d.mkdir(exist_ok=True); "
        f"(d / 'k.so').write_text('x'); os._exit({status})"
    )
    jobdir = tmp_path / "job"
    (jobdir / "rank-0").mkdir(parents=True)
    (jobdir / protocol.LOCK).touch()
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr("harness.procs.lock_is_held", lambda _: True)
    import sys

    job = protocol.Job(NONCE, 1, "none", sys.executable, ("-c", code), 30.0, 30.0)
    import signal

    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)}
    try:
        Supervisor(job, jobdir, 0).run(Wakeup(signal.SIGCHLD))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    record = protocol.read_record(jobdir / "rank-0" / protocol.EXIT)
    assert record is not None
    assert record["returncode"] == status
    assert (cache / "k.so").exists() is kept
