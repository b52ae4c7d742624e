"""Every family and strategy on real ranks: the splits are the same model, and upstream's V4 is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import blas
from harness.hosts import LocalHost
from harness.place import Place, machine_memory, rank_environment
from harness.request import Case, ModelRequest, Settings
from harness.sweep import Runner
from sharding import strategies
from tests.harness.shell import DATA, LLAMA, QWEN3, V4_SETS

V4 = str(DATA / "DeepSeek-V4-Flash.json")
OWN = ("tensor", "replicated-wo_b", "replicated-wo_b-late", "gathered-wo_b")
UPSTREAM_V4_IS_OFF_BY = 100
"""Times the tolerance, at least: what is measured is some thousand times."""


def check(
    request: ModelRequest, names: Sequence[str], ranks: int, logs: Path, backend: str = "mpi"
) -> dict[str, dict[str, Any]]:
    """Records by strategy, of one launch that checks and does not measure."""
    records: list[dict[str, Any]] = []
    source = request.resolve()
    place = Place(LocalHost(), rank_environment(blas.preload()), machine_memory())
    settings = Settings(check_prompt=21, check_decode=4, deadline_seconds=120, stall_seconds=60)
    cases = [Case(name, 0, name, ranks, backend, 1, 1, "ok") for name in names]
    Runner(place, [source], settings, logs, records.append, measure=False).run(cases)
    return {record["strategy"]: record for record in records}


def v4(**changes: Any) -> ModelRequest:
    """The published Flash config, made small; sinks and all else are random."""
    return ModelRequest(source=V4, layers=4, set={**V4_SETS, **changes.pop("set", {})}, **changes)


def assert_right(record: dict[str, Any]) -> None:
    """Ok: within the tolerance, ranks alike, counted as planned."""
    found = record["equivalence"]
    assert record["outcome"] == "ok", record["reasons"]
    assert found["relative_diff"] <= found["tolerance"]
    assert found["ranks_agree"] is True
    assert found["top1_agreement"] == 1.0
    assert found["collectives_counted"] == found["collectives_planned"]
    assert sum(found["collectives_counted"].values()) > 0
    assert found["first_divergence"] is None
    assert found["blocks_compared"] > 0


def assert_upstream_v4_is_wrong(record: dict[str, Any]) -> None:
    """Wrong from the first attention block on, and by far."""
    assert record["outcome"] == "wrong"
    found = record["equivalence"]
    assert found["first_divergence"] == {"layer": 0, "module": "attn"}
    assert found["relative_diff"] > UPSTREAM_V4_IS_OFF_BY * found["tolerance"]
    assert found["max_abs_diff"] > 0.01
    assert "layer 0 attn" in record["reasons"][0]
    assert found["ranks_agree"] is True
    assert found["collectives_counted"] == found["collectives_planned"]


def test_v4_on_two_ranks(tmp_path: Path) -> None:
    """All four strategies are exact, upstream is not: one launch for the five."""
    found = check(v4(), (*OWN, "upstream"), 2, tmp_path)
    for name in OWN:
        assert_right(found[name])
    assert_upstream_v4_is_wrong(found["upstream"])
    # Two sums a layer, and what each strategy's output projection adds.
    counted = {name: found[name]["collectives_counted"] for name in OWN}
    assert counted["tensor"] == counted["replicated-wo_b"] == {"all_sum": 8}
    assert counted["replicated-wo_b-late"] == {"all_sum": 8}
    assert counted["gathered-wo_b"] == {"all_sum": 8, "all_gather": 4}


@pytest.mark.slow
def test_v4_on_four_ranks(tmp_path: Path) -> None:
    """As on two, with more heads than any strategy can hide."""
    sizes = {"num_attention_heads": 16, "moe_intermediate_size": 128}
    found = check(v4(set=sizes), (*OWN, "upstream"), 4, tmp_path)
    for name in OWN:
        assert_right(found[name])
    assert_upstream_v4_is_wrong(found["upstream"])


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["4bit", "mxfp4"])
def test_v4_with_quantised_weights(tmp_path: Path, quantize: str) -> None:
    """Slices of quantised weights, scales and biases are those of the whole: float32 activations decide."""
    sizes = {"moe_intermediate_size": 128, "head_dim": 64, "q_lora_rank": 64}
    found = check(v4(set=sizes, quantize=quantize), (*OWN, "upstream"), 2, tmp_path)
    for name in OWN:
        assert_right(found[name])
        assert found[name]["quantization"] == quantize
    assert_upstream_v4_is_wrong(found["upstream"])


@pytest.mark.parametrize(
    ("config", "ranks", "backend"),
    [
        pytest.param(LLAMA, 4, "mpi", marks=pytest.mark.slow),
        pytest.param(QWEN3, 2, "ring", id="qwen3-2-ring"),
        pytest.param(LLAMA, 2, "mpi", marks=pytest.mark.slow),
        pytest.param(QWEN3, 2, "mpi", marks=pytest.mark.slow),
        pytest.param({**LLAMA, "tie_word_embeddings": True}, 2, "mpi", marks=pytest.mark.slow),
        pytest.param({**LLAMA, "attention_bias": True, "mlp_bias": True}, 2, "mpi", marks=pytest.mark.slow),
    ],
)
def test_dense_families(tmp_path: Path, config: dict[str, Any], ranks: int, backend: str) -> None:
    """Our table and the model's own `shard()` are both the whole model, over either backend."""
    path = tmp_path / "small.json"
    path.write_text(json.dumps(config))
    names = strategies.built_in(config["model_type"])
    assert names[-1] == "upstream"
    found = check(ModelRequest(source=str(path)), names, ranks, tmp_path / "logs", backend)
    assert set(found) == set(names)
    for record in found.values():
        assert_right(record)
        assert record["backend"] == backend


@pytest.mark.slow
def test_a_quantised_llama(tmp_path: Path) -> None:
    """4-bit weights whose input axes are cut between groups."""
    path = tmp_path / "small.json"
    path.write_text(json.dumps({**LLAMA, "intermediate_size": 256}))
    request = ModelRequest(source=str(path), quantize="4bit")
    for record in check(request, ["tensor", "upstream"], 2, tmp_path / "logs").values():
        assert_right(record)


def test_a_timed_dtype_below_float32(tmp_path: Path) -> None:
    """float32 decides what is right, bfloat16 is then checked statistically and timed: ok, with both in the record."""
    records: list[dict[str, Any]] = []
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(LLAMA))
    source = ModelRequest(source=str(path), dtype="bfloat16").resolve()
    place = Place(LocalHost(), rank_environment(blas.preload()), machine_memory())
    settings = Settings(check_prompt=21, check_decode=4, steps=6, warmup=1, prefills=1, stall_seconds=60)
    case = Case("bf16", 0, "tensor", 2, "mpi", 1, 9, "ok")
    Runner(place, [source], settings, tmp_path / "logs", records.append).run([case])
    (record,) = records
    assert record["outcome"] == "ok", record["reasons"]
    assert record["dtype"] == "bfloat16"
    assert record["seconds_per_step"] > 0
    assert record["equivalence"]["relative_diff"] <= record["equivalence"]["tolerance"]
    assert 0 < record["equivalence"]["timed_dtype"]["rms"] < 0.1
