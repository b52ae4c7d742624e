"""Lockstep ranks: collectives really reduce, and ranks that do not meet are found out."""

from __future__ import annotations

import mlx.core as mx
import pytest

from sharding import lockstep


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_collectives_reduce_over_all_ranks(ranks):
    """Sum, maximum, minimum and gather are those of all ranks' arrays, the same bits on each rank."""

    def work(group):
        own = mx.array([float(group.rank() + 1), -float(group.rank())])
        return [
            mx.distributed.all_sum(own, group=group).tolist(),
            mx.distributed.all_max(own, group=group).tolist(),
            mx.distributed.all_min(own, group=group).tolist(),
            mx.distributed.all_gather(own, group=group).tolist(),
        ]

    numbers = range(ranks)
    expected = [
        [float(sum(r + 1 for r in numbers)), -float(sum(numbers))],
        [float(ranks), 0.0],
        [1.0, -float(ranks - 1)],
        [x for r in numbers for x in (float(r + 1), -float(r))],
    ]
    assert lockstep.run(ranks, work) == [expected] * ranks


def test_a_gather_joins_along_the_first_axis():
    """all_gather gives what mx.distributed gives: one more or a longer first axis, scalars become a vector."""
    shapes = lockstep.run(3, lambda _: mx.distributed.all_gather(mx.zeros((2, 4))).shape)
    assert shapes == [(6, 4)] * 3
    scalars = lockstep.run(3, lambda g: mx.distributed.all_gather(mx.array(g.rank())).tolist())
    assert scalars == [[0, 1, 2]] * 3


def test_the_world_is_the_group():
    """Code that asks for the world by itself gets the same rank and size."""

    def work(group):
        world = mx.distributed.init()
        mx.distributed.all_sum(mx.zeros(1))
        again = mx.distributed.init()
        return (world.rank(), again.rank(), world.size()) == (group.rank(), group.rank(), group.size())

    assert lockstep.run(3, work) == [True] * 3


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (
            lambda g: mx.distributed.all_sum(mx.zeros(1)) if g.rank() else None,
            "rank 0 ended while rank 1 waits",
        ),
        (lambda g: mx.distributed.all_sum(mx.zeros(1 + g.rank())), "ranks disagree"),
        (lambda g: mx.distributed.all_sum(mx.zeros(1, [mx.float32, mx.int32][g.rank()])), "ranks disagree"),
        (lambda g: [mx.distributed.all_sum, mx.distributed.all_max][g.rank()](mx.zeros(1)), "ranks disagree"),
    ],
)
def test_ranks_that_do_not_meet_are_found_out(work, words):
    """A rank that stays away, or brings another shape, dtype or operation, would hang or corrupt real ranks."""
    with pytest.raises(lockstep.Mismatch, match=words):
        lockstep.run(2, work)


def test_a_rank_that_raises_ends_the_run_and_everything_is_put_back():
    """An exception of one rank comes out as it is; mx.distributed and compilation are as they were."""
    before = {name: getattr(mx.distributed, name) for name in ("all_sum", "all_gather", "init")}

    def work(group):
        mx.distributed.all_sum(mx.zeros(1))
        if group.rank() == 1:
            raise KeyError("lost")
        return mx.distributed.all_sum(mx.zeros(1))

    with pytest.raises(KeyError, match="lost"):
        lockstep.run(2, work)
    assert all(getattr(mx.distributed, name) is function for name, function in before.items())
    assert compiles()


def test_compilation_is_off_while_ranks_take_turns_and_on_afterwards():
    """A compiled function would be traced by one rank and replayed by the others without its collective."""

    @mx.compile
    def summed(x):
        return mx.distributed.all_sum(x * 2)

    assert lockstep.run(2, lambda g: summed(mx.array(1.0 + g.rank())).item()) == [6.0, 6.0]
    assert compiles()


def compiles() -> bool:
    """Whether mx.compile traces a function once and replays it then."""
    calls = []

    @mx.compile
    def noted(x):
        calls.append(1)
        return x + 1

    for _ in range(3):
        mx.eval(noted(mx.zeros(2)))
    return len(calls) == 1


def test_sums_are_taken_in_rank_order():
    """The order of addition is fixed, so that a run can be repeated bit for bit."""
    numbers = [1e8, 1.0, -1e8]

    def work(group):
        return mx.distributed.all_sum(mx.array(numbers[group.rank()])).item()

    expected = ((mx.array(1e8) + mx.array(1.0)) + mx.array(-1e8)).item()
    assert lockstep.run(3, work) == [expected] * 3
