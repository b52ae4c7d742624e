"""Which family serves which `model_type`."""

from __future__ import annotations

from sharding.families.base import Family
from sharding.families.deepseek_v4 import DEEPSEEK_V4
from sharding.families.llama import LLAMA
from sharding.families.qwen3 import QWEN3

FAMILIES = (LLAMA, QWEN3, DEEPSEEK_V4)
BY_MODEL_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def family_of(model_type: str) -> Family | None:
    """The family that serves `model_type`, or None: then only foreign strategies apply."""
    return BY_MODEL_TYPE.get(model_type)
