"""Strategies by name: built-in, upstream's, and whatever a user brings."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from sharding import load, lockstep, rows, strategies
from sharding.errors import BadRequest, Rejected
from sharding.trace import StandInGroup
from tests.sharding import small

SOURCE = small.resolve(small.LLAMA)


def named(name: str) -> str:
    """A strategy of the module with users' functions."""
    return f"tests.sharding.foreign:{name}"


def row(name: str, ranks: int = 2, source=SOURCE) -> rows.Row:
    """The plan of one strategy."""
    (found,) = rows.make_rows(source, [strategies.resolve(name, source.model_type)], [ranks], [1], [8])
    return found


def refused(call) -> str:
    """The one line with which a request is refused."""
    with pytest.raises(BadRequest) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "deepseek_v4"])
def test_every_built_in_name_is_found(model_type):
    """What is listed for a model type can be asked for, and `upstream` comes last."""
    names = strategies.built_in(model_type)
    assert names[-1] == "upstream"
    for name in names:
        found = strategies.resolve(name, model_type)
        assert (found.name, found.foreign, found.users_own) == (name, name == "upstream", False)


def test_a_model_type_without_a_table_has_upstream_alone():
    """A family that this project does not know can still be split by foreign code."""
    assert strategies.built_in("gpt_oss") == ["upstream"]
    assert strategies.resolve("upstream", "gpt_oss").family == "no table"


@pytest.mark.parametrize(
    "name",
    [
        "tensr",
        "replicated-wo_b",
        "",
        ":",
        ":function",
        "tests.sharding.foreign:",
        "tests.sharding.foreign:absent",
        "tests.sharding.foreign:NOT_CALLABLE",
        "tests.sharding.absent:function",
        "no such module:function",
        "..:x",
    ],
)
def test_a_strategy_that_is_not_there_is_a_bad_request(name):
    """An unknown name, or a function that can't be imported, is refused in one line that repeats it."""
    assert repr(name) in refused(lambda: strategies.resolve(name, "llama"))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise ValueError('two\\nlines')", "ValueError"),
        ("def (", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_module_that_raises_on_import_is_a_bad_request(tmp_path, monkeypatch, body, error):
    """Whatever the import of a user's module raises is one line that names the exception."""
    (tmp_path / "rude_strategy.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert error in refused(lambda: strategies.resolve("rude_strategy:f", "llama"))


def test_a_module_that_exits_on_import_is_a_bad_request(tmp_path, monkeypatch):
    """A script without a main guard that calls sys.exit() does not end this program."""
    (tmp_path / "exiting_strategy.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        refused(lambda: strategies.resolve("exiting_strategy:f", "llama"))
    except SystemExit:
        pytest.fail("the module's exit went through")


@pytest.mark.parametrize(
    "name", ["splits_in_place", "returns_a_module", "evaluates", "trains", "Namespace.split"]
)
def test_a_users_function_is_run_and_judged_like_any_other(name):
    """In place or as a new module, evaluated or not: a right split is right, and is traced like upstream's."""
    outputs = small.split(SOURCE, named(name), 2)
    assert small.distance(outputs, SOURCE) <= small.TOLERANCE
    planned, upstream = row(named(name)), row("upstream")
    assert planned.valid
    assert planned.traced
    assert planned.collectives_per_token == upstream.collectives_per_token == {"all_sum": 4}
    assert planned.weight_bytes_per_rank == upstream.weight_bytes_per_rank


@pytest.mark.parametrize("name", ["splits_in_place", "trains", "returns_a_module"])
def test_the_split_model_is_in_eval_mode(name):
    """Whatever a function leaves, the model that is measured is in eval mode."""
    found = strategies.resolve(named(name), "llama")
    model = found.apply(load.lazy(SOURCE), StandInGroup(0, 2), evaluate=False)
    assert not any(module.training for _, module in model.named_modules())


def test_a_function_that_returns_no_module_is_named():
    """A return value that is no module is an error that says what came back."""
    found = strategies.resolve(named("returns_a_number"), "llama")
    with pytest.raises(TypeError, match=r"returned int; it must return an nn\.Module or None"):
        found.apply(load.lazy(SOURCE), StandInGroup(0, 2))


@pytest.mark.parametrize(
    ("name", "words"), [("returns_a_number", "TypeError"), ("raises", "RuntimeError: no way to split over 2")]
)
def test_a_function_that_fails_is_a_row_with_its_reason(name, words):
    """Its plan is a row that is not valid, with the exception in one line."""
    found = row(named(name))
    assert not found.valid
    (line,) = found.reasons
    assert words in line
    assert "\n" not in line


def test_what_a_function_raises_comes_out_as_it_is():
    """When it is really applied its exception is the user's to see."""
    with pytest.raises(RuntimeError, match="no way to split"):
        small.split(SOURCE, named("raises"), 2)


def test_a_function_is_not_called_for_one_rank():
    """The baseline at one rank is the model that was never split."""
    (output,) = small.split(SOURCE, named("raises"), 1)
    assert small.distance([output], SOURCE) == 0
    assert row(named("raises"), ranks=1).collectives_per_token == {}


def test_ranks_that_would_wait_for_each_other_are_found_out():
    """A function that makes ranks ask for different collectives can't meet in lockstep."""
    with pytest.raises(lockstep.Mismatch):
        small.split(SOURCE, named("differs_by_rank"), 2)


def test_the_plan_of_uneven_ranks_has_an_entry_for_each():
    """Where ranks keep different shares, each rank's bytes are its own."""
    found = row(named("keeps_all_on_rank_zero"), ranks=3)
    saved = 3 * 128 * 64 * 4
    first, *rest = found.weight_bytes_per_rank
    assert rest == [first - saved] * 2
    assert found.replicated_weight_bytes_per_rank[0] == first


def test_the_plan_counts_the_busiest_rank():
    """Collectives and bytes are those of the rank that hands in most, though all ranks hold the same shapes."""
    found = row(named("sums_more_on_rank_one"))
    assert found.collectives_per_token == {"all_sum": 2}
    assert found.bytes_per_token == 2 * 64 * 4


def test_upstream_without_shard_is_refused_with_the_reason():
    """A model that has no `shard()` is a row that is not valid, and says so."""
    found = strategies.Strategy(
        "upstream", "llama", function=strategies.resolve("upstream", "llama").function
    )
    with pytest.raises(Rejected, match=r"has no shard\(\) of its own"):
        found.apply(nn.Linear(2, 2), StandInGroup(0, 2))


def test_the_expected_outcome_is_known_for_upstreams_fault():
    """Only the strategy that is known to be wrong is expected to be."""
    for name in strategies.built_in("deepseek_v4"):
        expected = "wrong" if name == "upstream" else "ok"
        assert strategies.resolve(name, "deepseek_v4").expected == expected
    assert strategies.resolve("upstream", "llama").expected == "ok"


def test_tracing_a_users_function_takes_no_memory():
    """A function that evaluates everything on the way still allocates nothing while it is planned."""
    source = small.published("Llama-3.1-8B")
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert row(named("evaluates"), source=source).collectives_per_token == {"all_sum": 64}
    assert mx.get_peak_memory() - before < 2**20
