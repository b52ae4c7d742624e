"""Cuts: what each rank keeps, that nothing is lost, and that quantised weights are cut where they may be."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_vlm.models.mla import MultiLinear
from mlx_vlm.models.switch_layers import SwitchLinear

from sharding import placement
from sharding.placement import Cut, Leaf, Once

bounded = settings(derandomize=True, max_examples=60, deadline=None, database=None)
DTYPES = (mx.float32, mx.bfloat16, mx.float16, mx.int32, mx.uint32, mx.uint8)
AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
MODES = [*AFFINE, ("mxfp4", 4, 32), ("mxfp8", 8, 32)]


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[Cut, int, mx.array]:
    """A legal cut, a world size and an array that it fits, of any rank and dtype."""
    ranks = draw(st.integers(1, 5))
    runs = draw(st.integers(1, 4))
    units = runs * ranks * draw(st.integers(1, 3))
    ndim = draw(st.integers(1, 4))
    axis = draw(st.integers(-ndim, -1))
    shape = [draw(st.integers(1, 3)) for _ in range(ndim)]
    shape[axis] = units * draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(DTYPES))
    count = math.prod(shape)
    return Cut(axis, units, runs), ranks, mx.arange(count).reshape(shape).astype(dtype)


@bounded
@given(cut_arrays())
def test_joined_shares_are_the_original(case):
    """All ranks' shares put together again are the array, bit for bit, whatever axis, units, runs and ranks."""
    cut, ranks, array = case
    shares = [cut.take(array, rank, ranks) for rank in range(ranks)]
    assert {tuple(share.shape) for share in shares} == {tuple(shares[0].shape)}
    assert sum(share.nbytes for share in shares) == array.nbytes
    joined = cut.join(shares)
    assert joined.dtype == array.dtype
    assert mx.array_equal(joined, array).item()


@bounded
@given(cut_arrays())
def test_spans_partition_the_axis(case):
    """Every index belongs to exactly one rank, each rank has equally many, and no unit is divided."""
    cut, ranks, array = case
    length = array.shape[cut.axis]
    unit = length // cut.units
    seen: list[int] = []
    for rank in range(ranks):
        spans = cut.spans(rank, ranks, length)
        own = [i for start, stop in spans for i in range(start, stop)]
        assert len(own) == length // ranks
        assert own == sorted(own)
        assert all(start % unit == stop % unit == 0 for start, stop in spans)
        seen += own
    assert sorted(seen) == list(range(length))


@bounded
@given(cut_arrays())
def test_every_run_is_shared_equally(case):
    """With runs, each rank keeps the same contiguous share of every run; with one run that is a contiguous slice."""
    cut, ranks, array = case
    length = array.shape[cut.axis]
    run = length // cut.runs
    for rank in range(ranks):
        spans = cut.spans(rank, ranks, length)
        assert len(spans) == cut.runs
        expected = [
            (r * run + rank * run // ranks, r * run + (rank + 1) * run // ranks) for r in range(cut.runs)
        ]
        assert spans == expected


def test_interleaved_and_contiguous_shares_written_out():
    """Eight heads in four groups of two: two ranks get one head of every group, or the first half of all."""
    heads = mx.arange(8)
    assert Cut(-1, 8, 4).take(heads, 0, 2).tolist() == [0, 2, 4, 6]
    assert Cut(-1, 8, 4).take(heads, 1, 2).tolist() == [1, 3, 5, 7]
    assert Cut(-1, 8).take(heads, 1, 2).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("axis", "units", "runs"), [(0, 4, 1), (-1, 0, 1), (-1, 4, 3), (-1, 4, 0), (-1, -4, 1)]
)
def test_a_cut_can_not_be_nonsense(axis, units, runs):
    """A cut that counts axes from the front, has no units, or unequal runs can't be made."""
    with pytest.raises(ValueError, match="not a cut"):
        Cut(axis, units, runs)


@pytest.mark.parametrize(("units", "runs", "ranks", "length"), [(6, 1, 4, 12), (8, 4, 4, 8), (4, 1, 2, 10)])
def test_an_uneven_share_is_refused(units, runs, ranks, length):
    """Units that do not divide by the ranks, or a length that does not consist of units, have no shares."""
    with pytest.raises(ValueError, match=r"no .* equal shares"):
        Cut(-1, units, runs).spans(0, ranks, length)


def test_a_share_does_not_keep_the_whole_in_memory():
    """A share is a copy: once the whole array is dropped, only the share's bytes remain."""
    mx.clear_cache()
    before = mx.get_active_memory()
    array = mx.random.normal((512, 512))
    mx.eval(array)
    share = Cut(-2, 8).take(array, 1, 8)
    mx.eval(share)
    del array
    assert mx.get_active_memory() - before <= share.nbytes + 2**12


def test_once_adds_up_to_the_original():
    """Of a bias that the block sums, rank 0 keeps all and the others zeros, so that the sum is the bias."""
    bias = mx.random.normal((3, 8))
    shares = [Once().take(bias, rank, 3) for rank in range(3)]
    assert mx.array_equal(sum(shares[1:], start=shares[0]), bias).item()
    assert mx.array_equal(Once().join(shares), bias).item()
    assert all(share.shape == bias.shape and share.dtype == bias.dtype for share in shares)


class Host(nn.Module):
    """A block with counts, as the attention blocks of real models have them."""

    def __init__(self, **counts: int) -> None:
        super().__init__()
        for name, count in counts.items():
            setattr(self, name, count)


def leaf_of(module: Any, **counts: int) -> Leaf:
    """A leaf on a host with these counts."""
    return Leaf("layers.0.proj", module, Host(**counts))


def dequantised(parts: dict[str, mx.array], module: nn.Module) -> mx.array:
    return mx.dequantize(
        parts["weight"],
        parts["scales"],
        parts.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


def quantised(kind: str, mode: str, bits: int, group: int, inputs: int, outputs: int) -> nn.Module:
    """A quantised linear layer, stack of experts, or grouped projection with random weights."""
    if kind == "linear":
        layer: nn.Module = nn.Linear(inputs, outputs, bias=True)
    elif kind == "experts":
        layer = SwitchLinear(inputs, outputs, 3, bias=True)
    else:
        layer = MultiLinear(inputs, outputs, 4)
    result: nn.Module = layer.to_quantized(group_size=group, bits=bits, mode=mode)
    return result


def shares_of(rule: placement.Placement, leaf: Leaf, rank: int, ranks: int) -> dict[str, mx.array]:
    """One rank's arrays of a leaf."""
    cuts, arrays = rule.cuts(leaf), leaf.arrays()
    assert cuts.keys() == arrays.keys()
    found = {}
    for name, array in arrays.items():
        share = cuts[name]
        found[name] = array if share is None else share.take(array, rank, ranks)
    return found


@pytest.mark.parametrize("kind", ["linear", "experts", "groups"])
@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
def test_a_quantised_share_is_the_slice_of_the_dequantised_whole(kind, mode, bits, group):
    """Cut, then dequantise, equals dequantise, then cut, bit for bit, for rows, columns and every quantisation."""
    layer = quantised(kind, mode, bits, group, 4 * group, 24)
    leaf = leaf_of(layer)
    complete = dequantised(leaf.arrays(), layer)
    for ranks in (2, 4):
        for rule, axis in ((placement.row(), -1), (placement.column(), -2)):
            assert rule.problems(leaf, ranks) == []
            parts = [shares_of(rule, leaf, rank, ranks) for rank in range(ranks)]
            joined = mx.concatenate([dequantised(part, layer) for part in parts], axis=axis)
            assert mx.array_equal(joined, complete).item()


@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
def test_a_quantised_interleaved_share_is_the_slice_of_the_dequantised_whole(mode, bits, group):
    """Interleaved heads of a quantised projection are those rows of the dequantised whole."""
    layer = quantised("linear", mode, bits, group, group, 48)
    leaf = leaf_of(layer, heads=16, groups=4)
    complete = dequantised(leaf.arrays(), layer)
    rule = placement.heads("heads", runs="groups")
    for rank in range(2):
        rows = [i for start, stop in Cut(-2, 16, 4).spans(rank, 2, 48) for i in range(start, stop)]
        part = dequantised(shares_of(rule, leaf, rank, 2), layer)
        assert mx.array_equal(part, complete[mx.array(rows)]).item()


@bounded
@given(
    st.sampled_from(MODES),
    st.integers(1, 12),
    st.integers(2, 8),
)
def test_a_cut_inside_a_quantisation_group_is_refused_with_numbers_that_work(mode_bits_group, groups, ranks):
    """Rows are cut between quantisation groups or not at all, and each world size that a refusal offers is legal."""
    mode, bits, group = mode_bits_group
    layer = quantised("linear", mode, bits, group, groups * group, 8)
    leaf = leaf_of(layer)
    problems = placement.row().problems(leaf, ranks)
    assert bool(problems) == bool(groups % ranks)
    if problems and (groups * group) % ranks == 0:
        (line,) = problems
        assert f"quantisation group of {group}" in line
        assert f"{groups * group // ranks} inputs a rank" in line
        offered = line.rpartition("ranks that work: ")[2].rstrip(")")
        works = [] if offered == "none" else [int(word) for word in offered.split(", ")]
        assert bool(works) == (groups > 1)
        for number in works:
            assert placement.row().problems(leaf, number) == []


def test_world_sizes_that_are_offered_suit_the_heads_too():
    """4 heads of 96 are 6 groups of 64: 2 ranks work, and 3 must not be offered, since 3 does not divide 4 heads."""
    leaf = leaf_of(quantised("linear", "affine", 4, 64, 4 * 96, 8), n_heads=4)
    rule = placement.row("n_heads", what="heads")
    (line,) = rule.problems(leaf, 4)
    offered = [int(word) for word in line.rpartition("ranks that work: ")[2].rstrip(")").split(", ")]
    assert offered
    for ranks in offered:
        assert rule.problems(leaf, ranks) == []


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (placement.column(), {"weight": (5, 4), "bias": (5,)}),
        (placement.row(), {"weight": (10, 2), "bias": (10,)}),
        (placement.row(reduce=("sum_output",)), {"weight": (10, 2), "bias": (10,)}),
        (placement.replicated, {"weight": (10, 4), "bias": (10,)}),
    ],
)
def test_shapes_of_a_linear_layers_shares(rule, expected):
    """A column cut takes the bias along, a row cut leaves it whole, since it is added once."""
    parts = shares_of(rule, leaf_of(nn.Linear(4, 10)), 1, 2)
    assert {name: tuple(part.shape) for name, part in parts.items()} == expected


def test_the_bias_of_stacked_experts_follows_the_outputs():
    """A bias (experts, outputs) is cut along its outputs and not along the experts."""
    parts = shares_of(placement.column(), leaf_of(SwitchLinear(6, 8, 4)), 1, 2)
    assert parts["bias"].shape == (4, 4)
    assert parts["weight"].shape == (4, 4, 6)


@pytest.mark.parametrize("rule", [placement.row(), placement.replicated_partial])
def test_a_bias_on_a_partial_sum_counts_once(rule):
    """Where the block sums what a biased layer gives, rank 0 alone adds the bias."""
    layer = nn.Linear(4, 6)
    layer.bias = mx.random.normal((6,))
    parts = [shares_of(rule, leaf_of(layer), rank, 2) for rank in range(2)]
    assert mx.array_equal(parts[0]["bias"], layer.bias).item()
    assert mx.array_equal(parts[1]["bias"], mx.zeros(6)).item()


def test_reasons_name_the_place_the_numbers_and_the_ranks():
    """A refusal says which module, how many pieces, and how many ranks they do not divide by."""
    leaf = leaf_of(nn.Linear(8, 9 * 4), n_heads=9)
    assert placement.heads("n_heads").problems(leaf, 2) == ["layers.0.proj: 9 heads do not divide by 2 ranks"]
    assert placement.heads("n_heads").problems(leaf, 3) == []
    assert placement.column().problems(leaf, 5) == ["layers.0.proj: 36 features do not divide by 5 ranks"]


def test_collectives_of_a_placement_have_the_width_of_what_is_summed():
    """An output sum moves the outputs, an input sum the inputs (unpacked), a gather one rank's share."""
    layer = quantised("linear", "affine", 3, 64, 128, 24)
    leaf = leaf_of(layer)
    assert [c.features for c in placement.row(reduce=("sum_output",)).collectives(leaf, 2)] == [24]
    assert [c.features for c in placement.replicated_after_sum.collectives(leaf, 2)] == [128]
    both = placement.column(reduce=("sum_input", "gather_output")).collectives(leaf, 2)
    assert [(c.kind, c.features) for c in both] == [("all_sum", 128), ("all_gather", 12)]
