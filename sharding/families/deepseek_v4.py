"""DeepSeek V4 on mlx-vlm's model: five ways to split its grouped output projection.

The attention's heads form `o_groups` groups. `wo_a` projects each group's heads by itself to `o_lora_rank`,
`wo_b` joins all groups to the hidden size. That leaves two ways to deal out heads: whole groups to a rank
(`tensor`), or a share of every group to every rank (exo and mlx-vlm). The sinks hold one value per head and
must be sliced exactly as the heads are. The latent key/value, its norm, the compressors and the indexer
are shared by all heads and stay whole, and so does the key/value cache.

Every strategy slices the width of all experts, folds the shared experts into the one all_sum of the MoE
block, and keeps the router and its hash table whole, so that all ranks route alike.
"""

from collections.abc import Hashable, Mapping

from sharding.families.base import Config, Family
from sharding.placement import (
    Block,
    Native,
    Placement,
    column,
    heads,
    replicated,
    replicated_after_sum,
    replicated_partial,
    row,
    stacked,
    vector,
)

ATTENTIONS = ("LocalAttention", "CompressedAttention", "SparseCompressedAttention")
SHARED = {
    "wq_a": replicated,
    "q_norm": replicated,
    "wkv": replicated,
    "kv_norm": replicated,
    "compressor": replicated,
    "indexer": replicated,
}
BY_GROUP = {
    "wq_b": column("o_groups", what="output groups"),
    "attn_sink": vector("o_groups", what="output groups"),
    "wo_a": stacked("o_groups"),
    "wo_b": row("o_groups", what="output groups"),
}
INTERLEAVED = {
    "wq_b": heads("n_heads", runs="o_groups"),
    "attn_sink": vector("n_heads", runs="o_groups"),
    "wo_a": row(),
}
REST = (
    Block(
        "DeepseekV4MoE",
        {
            "gate": replicated,
            "switch_mlp.gate_proj": column(),
            "switch_mlp.up_proj": column(),
            "switch_mlp.down_proj": row(),
            "shared_experts.gate_proj": column(),
            "shared_experts.up_proj": column(),
            "shared_experts.down_proj": row(),
        },
        native=Native("sharding_group", output="switch_mlp.down_proj"),
    ),
    Block(
        "DeepseekV4Block",
        {"attn_norm": replicated, "ffn_norm": replicated, "attn_hc": replicated, "ffn_hc": replicated},
    ),
    Block("DeepseekV4Model", {"embed_tokens": replicated, "norm": replicated, "hc_head": replicated}),
    Block("LanguageModel", {"lm_head": replicated}),
)


def attention(
    places: Mapping[str, Placement], divide: tuple[str, ...], native: Native | None = None
) -> tuple[Block, ...]:
    """The table of a strategy: the same entries for the three kinds of attention, then the rest."""
    return (*(Block(cls, {**SHARED, **places}, divide, native) for cls in ATTENTIONS), *REST)


AFTER_WO_B = Native("sharding_group", output="wo_b")

STRATEGIES = {
    # Whole output groups: one all_sum of hidden size, nothing replicated in the output projection.
    "tensor": attention(BY_GROUP, ("n_heads", "o_groups"), AFTER_WO_B),
    # exo: all_sum of o_groups * o_lora_rank, then the whole wo_b on every rank.
    "replicated-wo_b": attention({**INTERLEAVED, "wo_b": replicated_after_sum}, ("n_heads",)),
    # mlx-vlm's order: the whole wo_b on the partial sum, then all_sum of hidden size.
    "replicated-wo_b-late": attention({**INTERLEAVED, "wo_b": replicated_partial}, ("n_heads",), AFTER_WO_B),
    # What exo's docstring rejects: wo_b column parallel, and an all_gather of its output.
    "gathered-wo_b": attention(
        {**INTERLEAVED, "wo_b": column(reduce=("sum_input", "gather_output"))}, ("n_heads",)
    ),
}


def kinds(config: Config) -> list[Hashable]:
    """Compression ratio and routing of each layer."""
    hashed = int(config.get("num_hash_layers", 0))
    ratios = config["compress_ratios"]
    return [(ratios[i], "hash" if i < hashed else "router") for i in range(int(config["num_hidden_layers"]))]


def keep(config: Config, kept: list[int]) -> Config:
    """A config with only the layers `kept`, in order; hash-routed layers come first, as they must."""
    hashed = int(config.get("num_hash_layers", 0))
    return {
        **config,
        "num_hidden_layers": len(kept),
        "compress_ratios": [config["compress_ratios"][i] for i in kept],
        "num_hash_layers": sum(i < hashed for i in kept),
    }


DEEPSEEK_V4 = Family(
    name="deepseek_v4",
    library="mlx_vlm",
    model_types={"deepseek_v4": "deepseek_v4.language"},
    strategies=STRATEGIES,
    kinds=kinds,
    keep=keep,
    integers={"tid2eid": "num_experts"},
    known_wrong={
        "upstream": "mlx-vlm deals out heads interleaved by output group and their sinks in contiguous blocks"
    },
)
