"""Arrays of any MLX type and the facts about them, as one safetensors file that is there whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

_KEY = "shardbench"


def save_arrays(path: Path, arrays: Mapping[str, mx.array], about: Mapping[str, Any]) -> None:
    """Write them, readable by the owner only.

    Raises:
        OSError: the folder can't be written to.
    """
    # MLX appends .safetensors to a name without it.
    part = path.with_name(f".{path.name}.{os.getpid()}.safetensors")
    try:
        part.touch(mode=0o600)
        mx.save_safetensors(str(part), dict(arrays), {_KEY: json.dumps(about)})
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_arrays(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Read them; an array's bytes are read from disk when it is first used.

    Raises:
        ValueError: the file is missing, cut off or something else.
    """
    try:
        loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
        arrays, metadata = loaded
        about: dict[str, Any] = json.loads(metadata[_KEY])
    except (KeyError, RuntimeError, ValueError, OSError) as error:
        raise ValueError(f"{path.name} can't be read as a reference: {error}") from error
    return arrays, about
