"""Llama and what shares its layout: two row-parallel projections a layer, one all_sum each.

The same split as the model's own `shard()`: query, key and value heads and the MLP's width are dealt out,
embedding, norms and the head stay whole on every rank.
"""

from sharding.families.base import Family
from sharding.placement import Block, column, heads, replicated, row

ATTENTION = Block(
    "Attention",
    {
        "q_proj": heads("n_heads"),
        "k_proj": heads("n_kv_heads"),
        "v_proj": heads("n_kv_heads"),
        "o_proj": row("n_heads", reduce=("sum_output",), what="heads"),
    },
    divide=("n_heads", "n_kv_heads"),
)
MLP = Block(
    "MLP",
    {
        "gate_proj": column(),
        "up_proj": column(),
        "down_proj": row(reduce=("sum_output",)),
    },
)
LAYER = Block("TransformerBlock", {"input_layernorm": replicated, "post_attention_layernorm": replicated})
MODEL = Block("LlamaModel", {"embed_tokens": replicated, "norm": replicated})
HEAD = Block("Model", {"lm_head": replicated})

LLAMA = Family(
    name="llama",
    library="mlx_lm",
    # mlx-lm builds these with its llama module (see MODEL_REMAPPING in mlx_lm.utils).
    model_types={"llama": "llama", "mistral": "llama", "iquestcoder": "llama", "xverse": "llama"},
    strategies={"tensor": (ATTENTION, MLP, LAYER, MODEL, HEAD)},
)
