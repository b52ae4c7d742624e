"""The asv series: names that last, grids that only grow, classes that asv discovers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import series
from harness.series import Series
from tests.harness.results_samples import record, records


def test_each_form_of_a_model_is_a_series_of_its_own():
    """Another dtype, quantisation or cut is another name; another strategy, world, batch or context is not."""
    base = series.series_of(record())
    forms: list[dict[str, Any]] = [
        {"dtype": "bfloat16"},
        {"quantization": "4bit"},
        {"cuts": []},
        {"model": "Other"},
    ]
    for changes in forms:
        assert series.series_of(record(**changes)).name != base.name
    points: list[dict[str, Any]] = [
        {"strategy": "x"},
        {"ranks": 4},
        {"backend": "ring"},
        {"batch": 3},
        {"context": 9},
    ]
    for changes in points:
        assert series.series_of(record(**changes)).name == base.name
        assert series.point_of(record(**changes)) != series.point_of(record())


def test_one_rank_is_one_point_whatever_its_backend_is_called():
    """The unsharded reference has no wire, so its backend does not split its history."""
    points = {series.point_of(record(ranks=1, backend=backend)) for backend in ("none", "mpi", None)}
    assert len(points) == 1


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=30))
def test_any_model_name_gives_a_class_name(label):
    """Slashes, spaces, digits first or other scripts: the name can be a Python class, and differs from its neighbours'."""
    one = series.series_of(record(model=label))
    assert one.name.isidentifier()
    assert one.name.isascii()
    assert one.name != series.series_of(record(model=label + "!")).name


def test_a_grid_grows_and_keeps_its_order():
    """Uniting adds values, sorts ranks as numbers and drops no point that was there."""
    small = series.series_of(record(ranks=2, batch=16))
    large = series.series_of(record(ranks=16, batch=4))
    both = small.united(large)
    assert both.grid[1] == ("2 mpi", "16 mpi")
    assert both.grid[2] == (4, 16)
    assert both == large.united(small)
    assert both.united(small) == both


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("a-b", (("t",), ("1",), (1,), (1,))),
        ("a", (("t",), (), (1,), (1,))),
        ("a", (("t",), ("1",), (4, 1), (1,))),
        ("a", (("t",), ("1",), (1,))),
    ],
)
def test_a_bad_series_cant_be_made(name, grid):
    """No class name that isn't one, no empty axis, no order that asv would read as another grid."""
    with pytest.raises(ValueError, match=r"series|grid"):
        Series(name, "title", grid)


def test_the_file_gives_back_what_was_written(tmp_path):
    """Written and read, all series are the same; a folder without the file has none."""
    assert series.known(tmp_path) == {}
    written = series.unite(series.series_of(one) for one in records())
    assert len(written) == 2
    text = "".join(one.to_json() + "\n" for one in written.values())
    (tmp_path / series.FILE).write_text(text)
    assert series.known(tmp_path) == written


def test_a_merge_conflict_in_the_file_costs_no_other_series(tmp_path):
    """Lines that are no series are passed over, and two lines of one series are united."""
    one, other = series.series_of(record(batch=1)), series.series_of(record(batch=4))
    bad = ["<<<<<<< HEAD", '{"name": 1}', '{"name": "x", "title": "t", "grid": {}}', "null"]
    (tmp_path / series.FILE).write_text("\n".join([bad[0], one.to_json(), *bad[1:], other.to_json()]))
    assert series.known(tmp_path) == series.unite([one, other])


def test_a_class_of_bench_says_what_it_stands_for():
    """The class that asv finds has the grid, the unit, a fixed version and the cuts in words."""
    one = series.series_of(record())
    made: Any = series.benchmark_class("decode", one)
    assert made.__name__ == one.name
    assert made.params == [list(values) for values in one.grid]
    assert made.unit == "seconds"
    assert made.version == series.VERSION
    assert "num_hidden_layers 43 -> 4" in made.track_seconds_per_step.pretty_name
