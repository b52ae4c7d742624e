"""A request is validated before anything runs, and the same request always means the same cases."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from harness.request import ModelRequest, Settings, Sweep, expand, parse_sweep, read_sweep
from sharding.errors import BadRequest
from sharding.source import Source
from tests.harness.shell import DATA, LLAMA, QWEN3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two small models on disk."""
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    (tmp_path / "qwen3.json").write_text(json.dumps(QWEN3))
    return tmp_path


def sweep_of(folder: Path, **fields: Any) -> tuple[Sweep, list[Source]]:
    """A validated request and its models."""
    data = {"models": [{"source": "llama.json"}], **fields}
    sweep = parse_sweep(data, "a test")
    return sweep, [model.resolve(folder) for model in sweep.models]


def test_every_combination_is_a_case(folder: Path) -> None:
    """Strategies x ranks x backends x batches x contexts; one rank is measured once and without a backend."""
    sweep, models = sweep_of(
        folder,
        strategies=["tensor", "upstream"],
        ranks=[1, 2, 4],
        backends=["mpi", "ring"],
        batches=[1, 4],
        contexts=[8, 16],
    )
    cases = expand(sweep, models)
    alone = [case for case in cases if case.ranks == 1]
    assert len(alone) == 2 * 2
    assert {(case.strategy, case.backend, case.expect) for case in alone} == {("tensor", "none", "ok")}
    assert len(cases) == 4 + 2 * 2 * 2 * 2 * 2
    assert len({case.id for case in cases}) == len(cases)


def test_repetitions_are_one_case(folder: Path) -> None:
    """Asking for the same twice asks for it once."""
    sweep, models = sweep_of(
        folder, strategies=["tensor", "tensor"], ranks=[2, 2], backends=["mpi", "mpi"], batches=[1, 1]
    )
    assert len(expand(sweep, models)) == 1


def test_ids_are_stable_and_follow_the_model(folder: Path) -> None:
    """The same request gives the same ids, also after a round trip through JSON; another seed gives others."""
    sweep, models = sweep_of(folder, ranks=[2])
    again = [Source.from_json(json.loads(json.dumps(model.to_json()))) for model in models]
    reread = parse_sweep(json.loads(json.dumps(sweep.model_dump())), "sweep.json")
    ids = [case.id for case in expand(sweep, models)]
    assert [case.id for case in expand(reread, again)] == ids
    reseeded = [dataclasses.replace(model, seed=1) for model in models]
    assert not set(ids) & {case.id for case in expand(sweep, reseeded)}


def test_cases_of_one_launch_are_together(folder: Path) -> None:
    """Grouped by model, then ranks and backend: the runner launches once for each such group."""
    sweep, models = sweep_of(
        folder,
        models=[{"source": "llama.json"}, {"source": "qwen3.json"}],
        strategies=["tensor", "upstream"],
        ranks=[1, 2],
        backends=["mpi", "ring"],
        batches=[1, 2],
    )
    groups = [(case.model, case.ranks, case.backend) for case in expand(sweep, models)]
    changes = [group for i, group in enumerate(groups) if i == 0 or groups[i - 1] != group]
    assert len(changes) == len(set(changes)) == 2 * 3


def test_a_model_narrows_what_is_asked_of_all(folder: Path) -> None:
    """A model's own lists stand in place of the sweep's."""
    narrow = {"source": "qwen3.json", "strategies": ["tensor"], "ranks": [2], "batches": [3], "contexts": [5]}
    sweep, models = sweep_of(folder, models=[{"source": "llama.json"}, narrow], ranks=[2, 4])
    mine = [case for case in expand(sweep, models) if case.model == 1]
    assert [(c.strategy, c.ranks, c.batch, c.context) for c in mine] == [("tensor", 2, 3, 5)]


def test_strategies_default_to_all_of_the_family(folder: Path) -> None:
    """Without a list: every built-in one of the model's family, and upstream; V4's upstream is expected wrong."""
    small = {"source": str(DATA / "DeepSeek-V4-Flash.json"), "layers": 4}
    sweep, models = sweep_of(folder, models=[small], ranks=[2])
    expected = {case.strategy: case.expect for case in expand(sweep, models)}
    names = {"tensor", "replicated-wo_b", "replicated-wo_b-late", "gathered-wo_b", "upstream"}
    assert set(expected) >= names
    assert {expected[name] for name in names} == {"ok", "wrong"}
    assert expected["upstream"] == "wrong"


def test_what_is_expected_can_be_said(folder: Path) -> None:
    """`expect` overrides what is known of a strategy; of one rank nothing but ok is expected."""
    sweep, models = sweep_of(
        folder, strategies=["tensor", "upstream"], ranks=[1, 2], expect={"tensor": "wrong"}
    )
    assert [(c.ranks, c.strategy, c.expect) for c in expand(sweep, models)] == [
        (1, "tensor", "ok"),
        (2, "tensor", "wrong"),
        (2, "upstream", "ok"),
    ]


def test_relative_sources_count_from_the_file(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SWEEP.toml means the same wherever the command is run; its changes are applied."""
    path = folder / "sweep.toml"
    path.write_text(
        'ranks = [2]\n[settings]\nsteps = 5\n[[models]]\nsource = "llama.json"\nlabel = "mine"\nseed = 3\n'
        "set = { vocab_size = 96, rope_theta = 5000.0, tie_word_embeddings = true }\nlayers = 1\n"
    )
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    sweep = read_sweep(path)
    model = sweep.models[0].resolve(path.parent)
    assert (model.label, model.seed, model.config["vocab_size"]) == ("mine", 3, 96)
    assert model.config["rope_theta"] == 5000.0
    assert model.config["tie_word_embeddings"] is True
    assert model.config["num_hidden_layers"] == 1
    assert sweep.settings == Settings(steps=5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models = 3", "models"),
        ("", "models"),
        ("models = []", "models"),
        ("[[models]]", "source"),
        ("[[models", "TOML"),
        ('[[models]]\nsource = "llama.json"\nstrategy = "tensor"', "strategy"),
        ('rank = [2]\n[[models]]\nsource = "llama.json"', "rank"),
        ('ranks = []\n[[models]]\nsource = "llama.json"', "ranks"),
        ('ranks = [0]\n[[models]]\nsource = "llama.json"', "ranks"),
        ('ranks = ["2"]\n[[models]]\nsource = "llama.json"', "ranks"),
        ('ranks = [true]\n[[models]]\nsource = "llama.json"', "ranks"),
        ('batches = [-1]\n[[models]]\nsource = "llama.json"', "batches"),
        ('contexts = 64\n[[models]]\nsource = "llama.json"', "contexts"),
        ('expect = { tensor = "fine" }\n[[models]]\nsource = "llama.json"', "expect.tensor"),
        ('[settings]\nsteps = 0\n[[models]]\nsource = "llama.json"', "settings.steps"),
        ('[settings]\nstall_seconds = 0\n[[models]]\nsource = "llama.json"', "settings.stall_seconds"),
        ('[settings]\nstall_seconds = inf\n[[models]]\nsource = "llama.json"', "settings.stall_seconds"),
        ('[settings]\ndeadline_seconds = nan\n[[models]]\nsource = "llama.json"', "deadline_seconds"),
        ('[settings]\nspeed = 9\n[[models]]\nsource = "llama.json"', "settings.speed"),
    ],
)
def test_a_bad_file_is_refused_by_place(folder: Path, text: str, said: str) -> None:
    """The file, the key and what is wrong with it; a misspelt key is no key."""
    path = folder / "sweep.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"sweep\.toml") as refused:
        read_sweep(path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value).strip()


def test_a_file_that_is_no_text_is_refused(folder: Path) -> None:
    """Bytes, a folder, or nothing at all: one line."""
    (folder / "bytes.toml").write_bytes(b"\xff\xfe")
    (folder / "folder.toml").mkdir()
    for name in ("bytes.toml", "folder.toml", "missing.toml"):
        with pytest.raises(UsageError, match=name):
            read_sweep(folder / name)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"backends": ["jaccl"]}, "jaccl"),
        ({"strategies": ["no-such"]}, "no-such"),
        ({"strategies": ["no_such_module:split"]}, "no_such_module"),
        ({"expect": {"tesnor": "ok"}}, "tesnor"),
        ({"models": [{"source": "llama.json"}, {"source": "llama.json", "seed": 1}]}, "label"),
    ],
    ids=["backend", "strategy", "module", "expect", "labels"],
)
def test_what_only_the_models_can_tell_is_refused_as_well(
    folder: Path, fields: dict[str, Any], said: str
) -> None:
    """Unknown names, an expectation of something that is not run, and two models that can't be told apart."""
    sweep, models = sweep_of(folder, **fields)
    with pytest.raises((UsageError, BadRequest), match=said):
        expand(sweep, models)


def test_values_of_a_file_are_those_of_the_command_line(folder: Path) -> None:
    """`set` takes what TOML has; text that reads as JSON is what --set makes of it."""
    typed = ModelRequest(source="llama.json", set={"vocab_size": 96, "rope_scaling": {"type": "linear"}})
    text = ModelRequest(source="llama.json", set={"vocab_size": "96", "rope_scaling": '{"type": "linear"}'})
    assert typed.resolve(folder) == text.resolve(folder)
