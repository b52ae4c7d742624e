"""SOURCE: a checkpoint folder, a Hugging Face repo id, or a `config.json`, with the changes asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from sharding.errors import BadRequest
from sharding.families.base import Config, keep_plain, plain_kinds
from sharding.families.registry import family_of
from sharding.models import argument_class
from sharding.tree import renumber

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
QUANTISATIONS: dict[str, dict[str, Any]] = {
    "4bit": {"group_size": 64, "bits": 4, "mode": "affine"},
    "8bit": {"group_size": 64, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Source:
    """One model, resolved: everything a rank needs to build it.

    Attributes:
        label: Short name for tables.
        config: The config with all changes applied.
        folder: Folder with safetensors, or None: random weights from `seed`.
        seed: Seed of random weights and of what follows from them.
        dtype: Name of the activations' dtype.
        quantize: One of `QUANTISATIONS` to apply to float weights, or None.
        kept: Original numbers of the layers that were kept, or None for all.
        cuts: What was made smaller or changed, as "name old -> new".
        notes: What a reader should know, such as an ignored `quantization_config`.
    """

    label: str
    config: Config = field(repr=False)
    folder: str | None
    seed: int
    dtype: str
    quantize: str | None = None
    kept: tuple[int, ...] | None = None
    cuts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        """The config's `model_type`."""
        return str(self.config["model_type"])

    @property
    def quantization(self) -> str | None:
        """Short name of the weights' quantisation, or None."""
        if self.quantize:
            return self.quantize
        settings = self.config.get("quantization")
        if not settings:
            return None
        mode = settings.get("mode", "affine")
        return f"{settings['bits']}bit" if mode == "affine" else str(mode)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for job files."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Source:
        """The inverse of `to_json`."""
        kept = data["kept"]
        return cls(
            **{
                **data,
                "kept": None if kept is None else tuple(kept),
                "cuts": tuple(data["cuts"]),
                "notes": tuple(data["notes"]),
            }
        )


def resolve(
    text: str,
    *,
    sets: Iterable[str] = (),
    layers: int | None = None,
    quantize: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    fetch_weights: bool = True,
) -> Source:
    """Read SOURCE and apply `--set`, `--layers`, `--quantize` and `--dtype`.

    Args:
        text: Path of a folder or a `config.json`, or a Hugging Face repo id.
        sets: `key=value` overrides of config fields; values are JSON, or strings.
        layers: Keep this many layers, of every kind.
        quantize: One of `QUANTISATIONS`.
        dtype: One of `DTYPES`; by default the checkpoint's, and float32 on a CPU.
        seed: Seed of random weights.
        fetch_weights: For a repo id, whether to fetch its weights or just its config.

    Raises:
        BadRequest: With one line that says what is wrong and what would be right.
    """
    path = _path(text)
    if not path.exists():
        if not REPO_ID.fullmatch(text):
            raise BadRequest(
                f"SOURCE {text!r}: no such file or folder, and not a Hugging Face repo id like org/name"
            )
        path = _fetch(text, fetch_weights)
    config = read_config(path / "config.json" if path.is_dir() else path)
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    if path.is_dir() and not has_weights and (path / "model.safetensors.index.json").exists():
        raise BadRequest(
            f"{path}: an index of safetensors shards but none of them; fetch the checkpoint again"
        )
    notes = []
    if "quantization" not in config and (foreign := config.pop("quantization_config", None)):
        method = foreign.get("quant_method", "unknown") if isinstance(foreign, dict) else foreign
        notes.append(f"quantization_config ({method}) is another library's and is ignored")
    if path.is_dir() and not has_weights:
        notes.append("the folder has no *.safetensors: random weights")
    if quantize is not None and quantize not in QUANTISATIONS:
        raise BadRequest(f"--quantize {quantize!r}: unknown; choose one of {', '.join(QUANTISATIONS)}")
    if quantize and config.get("quantization"):
        raise BadRequest(f"--quantize {quantize}: {text} is quantised already; leave --quantize out")
    changed = []
    for item in sets:
        changed.append(_set(config, item))
    _check(config, str(path))
    kept = None
    if layers is not None:
        before = config.get("num_hidden_layers")
        config, kept = keep_layers(config, layers)
        changed.append(f"num_hidden_layers {before} -> {layers} (originals {_ranges(kept)})")
    return Source(
        label=_label(text, path),
        config=config,
        folder=str(path.resolve()) if has_weights else None,
        seed=seed,
        dtype=_dtype(dtype, config),
        quantize=quantize,
        kept=kept,
        cuts=tuple(changed),
        notes=tuple(notes),
    )


def _path(text: str) -> Path:
    """SOURCE as a path that can be asked for."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # Too long a name, a folder that may not be entered, ...
        reason = getattr(error, "strerror", None) or error
        raise BadRequest(
            f"SOURCE {text[:200]!r}: can't be read ({reason}); give a path that can be"
        ) from None
    return path


def read_config(path: Path) -> Config:
    """A `config.json` as a dictionary with a `model_type` and a layer count."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadRequest(f"{path}: no such file; a checkpoint folder needs a config.json") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadRequest(
            f"{path}: not a readable JSON file ({error}); expected a model's config.json"
        ) from None
    if not isinstance(config, dict):
        raise BadRequest(f"{path}: not a JSON object with a model_type; expected a model's config.json")
    _check(config, str(path))
    return config


def _check(config: Config, where: str) -> None:
    """Refuse what no model's code could make sense of."""
    if not isinstance(config.get("model_type"), str):
        raise BadRequest(
            f"{where}: model_type is {config.get('model_type')!r}; expected a model's config.json with a name there"
        )
    settings = config.get("quantization")
    if settings is None or settings == {}:
        return
    numbers = [settings.get(name) for name in ("bits", "group_size")] if isinstance(settings, dict) else []
    if not numbers or not all(type(number) is int and number > 0 for number in numbers):
        raise BadRequest(
            f"{where}: quantization is {settings!r:.200}; it must hold bits and group_size, whole numbers above 0"
        )


def keep_layers(config: Config, count: int) -> tuple[Config, tuple[int, ...]]:
    """Keep `count` layers that cover every kind of layer the model has.

    Returns:
        The config of the smaller model, and the original numbers of the kept layers in order.
    """
    family = family_of(config["model_type"])
    if not isinstance(config.get("num_hidden_layers"), int):
        raise BadRequest(f"--layers {count}: the config has no num_hidden_layers to cut; leave --layers out")
    try:
        kinds = (family.kinds if family else plain_kinds)(config)
    except (LookupError, TypeError, ValueError) as error:
        raise BadRequest(
            f"--layers {count}: the config does not say what each layer is ({type(error).__name__}: {error}); "
            "compare it with the published one"
        ) from None
    first: dict[Any, int] = {}
    for number, kind in enumerate(kinds):
        first.setdefault(kind, number)
    if not len(first) <= count <= len(kinds):
        raise BadRequest(
            f"--layers {count}: the model has {len(kinds)} layers of {len(first)} kinds; "
            f"choose {len(first)} to {len(kinds)}"
        )
    needed = set(first.values())
    spare = [number for number in range(len(kinds)) if number not in needed]
    kept = sorted(needed | set(spare[: count - len(needed)]))
    smaller = (family.keep if family else keep_plain)(config, kept)
    if isinstance(smaller.get("quantization"), dict):
        smaller["quantization"] = renumber(smaller["quantization"], kept)
    return smaller, tuple(kept)


def _set(config: Config, item: str) -> str:
    """Apply one `--set key=value`; returns the note "key old -> new"."""
    key, equals, raw = item.partition("=")
    if not equals or not key:
        raise BadRequest(f"--set {item!r}: expected key=value")
    try:
        value = json.loads(raw)
    except json.JSONDecodeError:
        value = raw
    *parents, last = key.split(".")
    holder = config
    for parent in parents:
        if not isinstance(holder.get(parent), dict):
            raise BadRequest(f"--set {key}: the config has no section {parent!r}")
        holder = holder[parent]
    if last not in holder and last not in argument_names(config):
        raise BadRequest(
            f"--set {key}: neither the config nor the model's arguments have this field; check its name"
        )
    old = holder.get(last, "default")
    holder[last] = value
    return f"{key} {old} -> {value}"


def argument_names(config: Config) -> Sequence[str]:
    """Names of the arguments that the model's own dataclass takes."""
    return tuple(argument_class(config).__dataclass_fields__)


def _dtype(asked: str | None, config: Config) -> str:
    if asked is not None:
        if asked not in DTYPES:
            raise BadRequest(f"--dtype {asked!r}: unknown; choose one of {', '.join(DTYPES)}")
        return asked
    if mx.default_device() == mx.Device(mx.cpu):
        return "float32"
    named = config.get("torch_dtype") or config.get("dtype")
    return named if named in DTYPES else "bfloat16"


def _label(text: str, path: Path) -> str:
    if path.is_dir():
        return text.rstrip("/").rsplit("/", 1)[-1] or path.resolve().name
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 2, 3, 4] as "0, 2-4"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in parts)


def _fetch(repo: str, weights: bool) -> Path:
    """A repo's files from the Hugging Face hub or its local cache."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", *(["*.safetensors", "*.jinja", "*.model", "*.txt"] if weights else [])]
    try:
        return Path(snapshot_download(repo, allow_patterns=patterns))
    except Exception as error:  # Many kinds: no network, no such repo, gated. All mean that it can't be had.
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise BadRequest(
            f"SOURCE {repo!r}: can't be fetched from the Hugging Face hub ({type(error).__name__}: {first}); "
            "give a local folder or config.json"
        ) from None
