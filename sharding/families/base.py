"""What a family is: where its model code lives, which tables split it, how it is cut down."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sharding.placement import Block

Config = dict[str, Any]


def per_layer_lists(config: Config) -> list[str]:
    """Keys whose value lists one entry per layer."""
    layers = int(config["num_hidden_layers"])
    # Lists of token ids or class names may be as long as the model is deep, by chance.
    unrelated = ("_token_id", "_token_ids", "architectures")
    return sorted(
        key
        for key, value in config.items()
        if isinstance(value, list) and len(value) == layers > 1 and not key.endswith(unrelated)
    )


def plain_kinds(config: Config) -> list[Hashable]:
    """The kind of each layer is what the per-layer lists say of it."""
    keys = per_layer_lists(config)
    return [tuple(str(config[key][i]) for key in keys) for i in range(int(config["num_hidden_layers"]))]


def keep_plain(config: Config, kept: list[int]) -> Config:
    """A config with only the layers `kept`; per-layer lists are rewritten."""
    lists = {key: [config[key][i] for i in kept] for key in per_layer_lists(config)}
    return {**config, **lists, "num_hidden_layers": len(kept)}


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: The family's name.
        library: Package with the model code, `mlx_lm` or `mlx_vlm`.
        model_types: `model_type` of a config to the module below `<library>.models` that builds it.
        strategies: Strategy name to its table.
        kinds: Config to the kind of each layer; `--layers` keeps every kind.
        keep: Config and kept layer numbers to the config of the smaller model.
        integers: Integer parameters by name, to the attribute of their module that bounds their values
            (exclusive); random weights need it.
        known_wrong: Strategies that are known to compute another function than the whole model, to the reason.
            Runs expect them to be found `wrong`.
    """

    name: str
    library: str
    model_types: Mapping[str, str]
    strategies: Mapping[str, tuple[Block, ...]]
    kinds: Callable[[Config], list[Hashable]] = plain_kinds
    keep: Callable[[Config, list[int]], Config] = keep_plain
    integers: Mapping[str, str] = field(default_factory=dict)
    known_wrong: Mapping[str, str] = field(default_factory=dict)

    def module(self, model_type: str) -> str:
        """Dotted name of the Python module with the model's classes."""
        return f"{self.library}.models.{self.model_types[model_type]}"
