"""A checkpoint with random weights, in the form in which mlx-community publishes them.

Safetensors shards with an index, `quantization` in the config, parameters under the names that mlx-lm and
mlx-vlm load. Written one shard at a time into a folder beside the target, which is renamed when it is whole.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx

from sharding import load
from sharding.errors import BadRequest
from sharding.source import QUANTISATIONS, Source
from sharding.tree import at, stages

SHARD_BYTES = 2 * 2**30


def write(source: Source, target: Path, *, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write a checkpoint of `source` to a new folder.

    Args:
        source: What to build; weights are random from its seed unless it has a folder of its own.
        target: Folder to make; it must not exist.
        shard_bytes: Begin a new safetensors file when the current one would grow beyond this.

    Returns:
        The files written.

    Raises:
        BadRequest: The target exists or can't be written.
    """
    if target.exists():
        raise BadRequest(f"{target}: exists already; choose another folder or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise BadRequest(f"{target}: can't be written ({error.strerror}); choose another folder") from None
    try:
        _write_tensors(source, work, shard_bytes)
        (work / "config.json").write_text(json.dumps(_config(source), indent=2) + "\n", encoding="utf-8")
        work.chmod(0o755)
        work.rename(target)
    except OSError as error:
        raise BadRequest(
            f"{target}: can't be written ({error.strerror or error}); nothing was left"
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return sorted(target.iterdir())


def _write_tensors(source: Source, folder: Path, shard_bytes: int) -> None:
    model = load.lazy(source)
    shards: list[dict[str, mx.array]] = [{}]
    names: list[list[str]] = []
    size = total = 0

    def flush() -> None:
        nonlocal size
        if shards[0]:
            mx.save_safetensors(
                str(folder / f"part-{len(names)}.safetensors"), shards[0], metadata={"format": "mlx"}
            )
            names.append(list(shards[0]))
        shards[0] = {}
        size = 0

    for paths in stages(model):
        for path in paths:
            array = at(model, path)
            if size and size + array.nbytes > shard_bytes:
                flush()
            mx.eval(array)
            shards[0][path] = array
            size += array.nbytes
            total += array.nbytes
            at(model, path.rpartition(".")[0]).pop(path.rpartition(".")[2])  # the shard holds it now
        mx.clear_cache()
    flush()
    weight_map: dict[str, str] = {}
    for number, members in enumerate(names):
        final = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / final)
        weight_map |= dict.fromkeys(members, final)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _config(source: Source) -> dict[str, object]:
    config = dict(source.config)
    if source.quantize:
        config["quantization"] = dict(QUANTISATIONS[source.quantize])
    config["torch_dtype"] = source.dtype
    config["shardbench"] = {
        "seed": source.seed,
        "random_weights": source.folder is None,
        "cuts": list(source.cuts),
    }
    return config
