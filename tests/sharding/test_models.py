"""Model code of mlx-lm and mlx-vlm: found, built without weights, and imported without what it does not need."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from sharding import models
from sharding.families import registry
from tests.sharding import small

ROOT = Path(__file__).parents[2]


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_planning_does_not_import_transformers():
    """Building both libraries' models leaves out what their packages import for other purposes."""
    code = """
import sys
from sharding import rows, strategies
from tests.sharding import small
for config in (small.LLAMA, small.V4):
    source = small.resolve(config)
    rows.make_rows(source, [strategies.resolve("tensor", source.model_type)], [2], [1], [4])
print(sorted({"transformers", "torch", "mlx_lm.utils", "mlx_vlm.utils"} & sys.modules.keys()))
"""
    assert fresh(code) == "[]"


def test_the_packages_are_whole_for_whoever_asks():
    """Code that imports the packages afterwards finds their names, and the same classes."""
    code = """
from sharding import models
llama = models.import_model_module("mlx_lm.models.llama")
v4 = models.import_model_module("mlx_vlm.models.deepseek_v4.language")
from mlx_lm import load, generate
import mlx_lm.models.llama
import mlx_vlm.models.deepseek_v4
assert callable(load) and callable(generate)
assert mlx_lm.models.llama.Model is llama.Model
assert mlx_vlm.models.deepseek_v4.Model is not None
assert not hasattr(mlx_lm, "no_such_name")
print(mlx_lm.__version__)
"""
    assert fresh(code)


def test_the_version_of_a_package_is_there_at_once():
    """`mlx_lm.__version__` is a name that the package defines, and is found first thing."""
    code = """
from sharding import models
models.import_model_module("mlx_lm.models.llama")
import mlx_lm
print(mlx_lm.__version__)
"""
    assert fresh(code)


@pytest.mark.parametrize(
    ("model_type", "module"),
    [
        ("llama", "mlx_lm.models.llama"),
        ("mistral", "mlx_lm.models.llama"),
        ("qwen3", "mlx_lm.models.qwen3"),
        ("deepseek_v4", "mlx_vlm.models.deepseek_v4.language"),
        ("minimax_m2", "mlx_lm.models.minimax"),
        ("gpt_oss", "mlx_lm.models.gpt_oss"),
    ],
)
def test_a_model_type_is_built_by_its_library(model_type, module):
    """With a table or without, a model type is found where it is, under its own or another name."""
    assert models.model_module(model_type) == module


def test_names_are_those_of_mlx_lm():
    """Where a model type is built by another one's module, mlx-lm's own table says the same."""
    spec = importlib.util.find_spec("mlx_lm.models.llama")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parents[1] / "utils.py").read_text(encoding="utf-8")
    remapping = ast.literal_eval(text.partition("MODEL_REMAPPING = ")[2].partition("}")[0] + "}")
    ours = dict(models.OTHER_NAMES)
    for family in registry.FAMILIES:
        if family.library == "mlx_lm":
            ours |= {t: name for t, name in family.model_types.items() if t != name}
    assert ours
    assert {model_type: remapping.get(model_type) for model_type in ours} == ours


def test_a_model_is_built_from_the_class_of_its_module():
    """Classes come from the library's module, never from one of the same name elsewhere."""
    for config in (small.LLAMA, small.MISTRAL, small.QWEN3, small.V4):
        model = models.build(dict(config))
        assert type(model).__module__ == models.model_module(config["model_type"])
        assert len(model.model.layers) == config["num_hidden_layers"]


def test_building_allocates_nothing():
    """A model of a hundred billion parameters takes no memory until it is evaluated."""
    config = small.published("DeepSeek-V4-Flash").config
    mx.clear_cache()
    before = mx.get_active_memory()
    models.build(config)
    assert mx.get_active_memory() - before < 2**20
