"""Qwen3 (dense): llama's layout with an RMS norm over each query and key head.

The norms have one weight of `head_dim` for all heads, so they stay whole on every rank.
"""

from sharding.families.base import Family
from sharding.families.llama import ATTENTION, HEAD, LAYER, MLP
from sharding.placement import Block, replicated

QK_NORM_ATTENTION = Block(
    "Attention",
    {**ATTENTION.places, "q_norm": replicated, "k_norm": replicated},
    divide=ATTENTION.divide,
)
MODEL = Block("Qwen3Model", {"embed_tokens": replicated, "norm": replicated})

QWEN3 = Family(
    name="qwen3",
    library="mlx_lm",
    model_types={"qwen3": "qwen3"},
    strategies={"tensor": (QK_NORM_ATTENTION, MLP, LAYER, MODEL, HEAD)},
)
