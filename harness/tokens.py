"""The tokens of a source: how many it knows, and a text in them."""

from __future__ import annotations

from pathlib import Path

from harness.errors import UsageError
from sharding.source import Source


def vocabulary_of(source: Source) -> int:
    """Tokens that prompts are drawn from."""
    config = source.config
    nested = config.get("text_config")
    return int(config.get("vocab_size") or (nested or {}).get("vocab_size") or 0)


def tokenize(source: Source, text: str) -> list[int]:
    """Token ids of a text, through the checkpoint's own tokenizer, without special tokens.

    Raises:
        UsageError: The source has no tokenizer, or the text no tokens, or more than the model knows.
    """
    from tokenizers import Tokenizer

    path = Path(source.folder or "") / "tokenizer.json"
    if source.folder is None or not path.is_file():
        raise UsageError(
            f"--prompt: {source.label} has no tokenizer.json; leave --prompt out for seeded random ids"
        )
    try:
        ids = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
    except Exception as error:  # The library raises bare exceptions.
        raise UsageError(f"{path}: not a usable tokenizer ({error}); fetch the checkpoint again") from None
    if not ids:
        raise UsageError(f"--prompt {text!r}: no tokens in it; give more text")
    if max(ids) >= (known := vocabulary_of(source)):
        raise UsageError(
            f"--prompt: the tokenizer gives id {max(ids)}, and {source.label} knows {known} tokens; leave --prompt "
            "out, or vocab_size as it is"
        )
    return list(ids)
