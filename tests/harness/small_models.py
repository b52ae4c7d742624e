"""Small real models with random weights everywhere, correct splits of them in one process, and ways to break them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

VOCABULARY = 128


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill every parameter, norms, biases and sinks included: what is left at zero hides faults."""
    key = mx.random.key(seed)
    weights = []
    parameters: Any = tree_flatten(model.parameters())
    for path, value in parameters:
        key, k = mx.random.split(key)
        noise = mx.random.normal(value.shape, key=k)
        if value.dtype == mx.int32:
            filled = mx.random.randint(0, 8, value.shape, key=k).astype(value.dtype)
        elif value.ndim == 1:
            filled = 1 + 0.1 * noise if "norm" in path else 0.3 * noise
        else:
            filled = noise if "embed" in path else noise * (1.5 / math.sqrt(value.shape[-1]))
        weights.append((path, filled))
    model.load_weights(weights)
    model.eval()
    mx.eval(model.parameters())
    return model


def llama(seed: int = 0, **changes: Any) -> nn.Module:
    """Three layers of llama, with attention biases so that there are some to lose."""
    from mlx_lm.models.llama import Model, ModelArgs

    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "attention_bias": True,
        "tie_word_embeddings": False,
    }
    return randomise(Model(ModelArgs(**{**config, **changes})), seed)


def gemma3(seed: int = 0) -> nn.Module:
    """Three layers of Gemma 3: sliding windows, and so rotating caches, beside a full one."""
    from mlx_lm.models.gemma3_text import Model, ModelArgs

    config = ModelArgs(
        model_type="gemma3_text",
        hidden_size=64,
        num_hidden_layers=3,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        sliding_window=16,
        sliding_window_pattern=2,
    )
    return randomise(Model(config), seed)


def deepseek_v4(seed: int = 0) -> nn.Module:
    """Four layers of DeepSeek V4: each kind of attention, a hash-routed and routed experts, hyper-connections."""
    from mlx_vlm.models.deepseek_v4.config import ModelConfig
    from mlx_vlm.models.deepseek_v4.language import LanguageModel

    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=8,
        head_dim=16,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        o_groups=4,
        o_lora_rank=16,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=4,
        num_hash_layers=1,
        sliding_window=16,
        compress_ratios=[0, 4, 128, 0],
    )
    return randomise(LanguageModel(config), seed)


class SplitLinear(nn.Module):
    """A row-parallel linear layer with its ranks in one process: N partial products, added up, then the bias once."""

    def __init__(self, whole: nn.Linear, ranks: int) -> None:
        super().__init__()
        self.parts = [mx.contiguous(w) for w in mx.split(whole.weight, ranks, axis=1)]
        if "bias" in whole:
            self.bias = whole.bias

    def __call__(self, x: mx.array) -> mx.array:
        width = self.parts[0].shape[1]
        total = x[..., :width] @ self.parts[0].T
        for i, part in enumerate(self.parts[1:], 1):
            total = total + x[..., i * width : (i + 1) * width] @ part.T
        return total + self.bias if "bias" in self else total


def split_llama(model: nn.Module, ranks: int) -> nn.Module:
    """Row-parallel sums as tensor parallelism makes them; also for Gemma 3."""
    for layer in model.layers:
        layer.self_attn.o_proj = SplitLinear(layer.self_attn.o_proj, ranks)
        layer.mlp.down_proj = SplitLinear(layer.mlp.down_proj, ranks)
    return model


def split_v4(model: nn.Module, ranks: int) -> nn.Module:
    """The same for DeepSeek V4's output projection and shared experts."""
    for layer in model.layers:
        layer.attn.wo_b = SplitLinear(layer.attn.wo_b, ranks)
        layer.ffn.shared_experts.down_proj = SplitLinear(layer.ffn.shared_experts.down_proj, ranks)
    return model


def replace_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make one module do something else; `call` gets the original call first."""
    cls = type(module)

    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(lambda *a, **k: cls.__call__(self, *a, **k), *args, **kwargs)

    object.__setattr__(module, "__class__", type(cls.__name__, (cls,), {"__call__": changed}))
