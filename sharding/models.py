"""Real model code from mlx-lm and mlx-vlm, built lazily: MLX allocates nothing until it is evaluated.

Importing either package runs its `__init__`, which imports transformers and more (seconds). Only the module
with the model's classes is needed here, so the package is registered without running its `__init__`; that
runs on first use of a name it would have defined, so that foreign code finds a whole package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

import mlx.nn as nn

from sharding.errors import BadRequest
from sharding.families.registry import family_of

# Model types that are another module's, for families without a table (facts of MODEL_REMAPPING in mlx_lm.utils).
OTHER_NAMES = {
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "minimax_m2": "minimax",
    "deepseek_v41_text": "deepseek_v41",
}


class _LazyPackage(types.ModuleType):
    """A package whose `__init__` runs when a name is asked for that it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        hidden = name.startswith("__") and name != "__version__"  # what the import machinery looks for
        if hidden or self.__dict__.get("_loaded"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__dict__["_loaded"] = True
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(self)
        return getattr(self, name)


def lazy_package(name: str) -> None:
    """Register package `name` without running its `__init__`; a package that is imported already is left alone."""
    if name in sys.modules:
        return
    parent = name.rpartition(".")[0]
    if parent:
        lazy_package(parent)
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No package named {name!r}", name=name)
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _LazyPackage
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], name.rpartition(".")[2], module)


def import_model_module(dotted: str) -> types.ModuleType:
    """Import `mlx_lm.models.llama` and the like without the packages' own `__init__`."""
    lazy_package(dotted.split(".", maxsplit=1)[0])
    parent = dotted.rpartition(".")[0]
    if parent.count(".") > 1:
        lazy_package(parent)
    return importlib.import_module(dotted)


def model_module(model_type: str) -> str:
    """Dotted name of the module that builds `model_type`.

    Raises:
        BadRequest: Neither library has it.
    """
    family = family_of(model_type)
    if family is not None:
        return family.module(model_type)
    name = OTHER_NAMES.get(model_type, model_type)
    if name.isidentifier():
        for dotted in (f"mlx_lm.models.{name}", f"mlx_vlm.models.{name}.language"):
            if _exists(dotted):
                return dotted
    raise BadRequest(
        f"model_type {model_type!r} is known neither to mlx-lm nor to mlx-vlm here; "
        "check config.json's model_type or install a release that has it"
    )


def _exists(dotted: str) -> bool:
    """Whether the module is there, found without running any package's `__init__`."""
    try:
        lazy_package(dotted.split(".", maxsplit=1)[0])
        parent = dotted.rpartition(".")[0]
        if parent.count(".") > 1:
            lazy_package(parent)
        return importlib.util.find_spec(dotted) is not None
    except ModuleNotFoundError:
        return False


def argument_class(config: dict[str, Any]) -> Any:
    """The dataclass that the model's code builds from a config."""
    dotted = model_module(config["model_type"])
    if dotted.startswith("mlx_vlm."):
        settings = import_model_module(f"{dotted.rpartition('.')[0]}.config")
        return getattr(settings, "TextConfig", None) or settings.ModelConfig
    return import_model_module(dotted).ModelArgs


def build(config: dict[str, Any]) -> nn.Module:
    """The whole model of a config, unevaluated, with the initial values of its classes.

    Raises:
        BadRequest: Unknown `model_type`, or a config that the model's own code refuses.
    """
    model_type = config["model_type"]
    module = import_model_module(model_module(model_type))
    try:
        make = getattr(module, "Model", None) or module.LanguageModel
        model: nn.Module = make(argument_class(config).from_dict(config))
    except Exception as error:  # The model's own code decides what it refuses, and with which exception.
        raise BadRequest(
            f"config.json: {model_type} can't be built ({type(error).__name__}: {error}); "
            "compare it with the published config"
        ) from error
    return model
