"""What is asked of `run`: models x strategies x ranks x backends x batches x contexts, and how to check and measure.

strategies = ["tensor", "upstream"]          # by default all that a model's family has
ranks = [1, 2]
batches = [1, 16]
contexts = [32]

[[models]]
source = "DeepSeek-V4-Flash.json"            # relative to this file
layers = 4
set = { n_routed_experts = 8 }
ranks = [2]                                  # a model may narrow what is asked of all
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import UsageError
from sharding import source as sources
from sharding import strategies
from sharding.source import Source

Positive = Annotated[int, Field(ge=1, strict=True)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Several = Annotated[tuple[Positive, ...], Field(min_length=1)]
BACKENDS = ("mpi", "ring")
Outcome = Literal["ok", "wrong", "crashed", "hung", "infeasible", "unreachable"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Settings(_Model):
    """How each case is checked and measured.

    Attributes:
        steps: Measured decode steps of each case.
        warmup: Decode steps before that, at the same shapes.
        burst: Measured steps of one strategy before the next one's turn.
        prefills: Measured prefills of each case; one more comes first to warm up.
        check_batch, check_prompt, check_decode: Size of the check that every strategy must pass before it is timed.
        shape_decode: Decode steps of the end-to-end check at each timed batch and context.
        ragged: Whether prompts of unequal lengths are checked, where the model's cache supports them.
        prompt: Text of the prompts, through the checkpoint's tokenizer; None means seeded random ids.
        deadline_seconds: Of one job.
        stall_seconds: A rank that reports nothing for so long is hung.
    """

    steps: Positive = 32
    warmup: Positive = 8
    burst: Positive = 4
    prefills: Positive = 3
    check_batch: Positive = 2
    check_prompt: Positive = 37
    check_decode: Positive = 12
    shape_decode: Positive = 2
    ragged: bool = True
    prompt: str | None = None
    deadline_seconds: Seconds = 3600.0
    stall_seconds: Seconds = 300.0


class ModelRequest(_Model):
    """One model of a sweep; unset fields are the sweep's."""

    source: str
    label: str | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    layers: Positive | None = None
    quantize: str | None = None
    dtype: str | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    strategies: tuple[str, ...] | None = None
    ranks: Several | None = None
    batches: Several | None = None
    contexts: Several | None = None

    def resolve(self, base: Path | None = None, *, fetch_weights: bool = True) -> Source:
        """The model, with its changes applied; a relative path counts from `base`."""
        text = self.source
        if base is not None and (base / text).exists():
            text = str(base / text)
        found = sources.resolve(
            text,
            sets=[
                f"{key}={value if isinstance(value, str) else json.dumps(value)}"
                for key, value in self.set.items()
            ],
            layers=self.layers,
            quantize=self.quantize,
            dtype=self.dtype,
            seed=self.seed,
            fetch_weights=fetch_weights,
        )
        return Source.from_json({**found.to_json(), "label": self.label}) if self.label else found


class Sweep(_Model):
    """A whole request."""

    models: Annotated[tuple[ModelRequest, ...], Field(min_length=1)]
    strategies: tuple[str, ...] | None = None
    ranks: Several = (1, 2)
    backends: Annotated[tuple[str, ...], Field(min_length=1)] = ("mpi",)
    batches: Several = (1,)
    contexts: Several = (64,)
    expect: dict[str, Outcome] = Field(default_factory=dict)
    settings: Settings = Settings()


@dataclass(frozen=True)
class Case:
    """One point of a sweep.

    Attributes:
        id: Stable name: the same request gives the same names, so that a run can be resumed.
        model: Index of its source.
        backend: `mpi`, `ring`, or `none` for one rank.
        expect: The outcome that counts as success.
    """

    id: str
    model: int
    strategy: str
    ranks: int
    backend: str
    batch: int
    context: int
    expect: str


def read_sweep(path: Path) -> Sweep:
    """Read SWEEP.toml.

    Raises:
        UsageError: With the file, the key, the value and what would be right.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; give a SWEEP.toml or a SOURCE") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: not readable as TOML: {error}") from None
    return parse_sweep(data, str(path))


def parse_sweep(data: dict[str, Any], where: str) -> Sweep:
    """Validate a request; `where` names its origin in errors."""
    try:
        return Sweep.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        value = first.get("input")
        shown = "" if isinstance(value, dict) else f" (is {value!r})"
        raise UsageError(f"{where}: {place}: {first['msg']}{shown}") from None


def expand(sweep: Sweep, models: list[Source]) -> list[Case]:
    """Every case, grouped as they are run: by model, ranks and backend, then batch, context and strategy.

    Raises:
        UsageError, BadRequest: Unknown strategy or backend, or two models of the same label.
    """
    for backend in sweep.backends:
        if backend not in BACKENDS:
            raise UsageError(f"backend {backend!r}: unknown; choose one of {', '.join(BACKENDS)}")
    labels = [model.label for model in models]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"two models are called {label!r}: give each a label of its own")
    cases = []
    known: dict[str, None] = {}
    for index, (request, model) in enumerate(zip(sweep.models, models, strict=True)):
        names = request.strategies or sweep.strategies or tuple(strategies.built_in(model.model_type))
        found = [strategies.resolve(name, model.model_type) for name in dict.fromkeys(names)]
        known |= dict.fromkeys(strategy.name for strategy in found)
        for ranks in dict.fromkeys(request.ranks or sweep.ranks):
            for backend in ("none",) if ranks == 1 else tuple(dict.fromkeys(sweep.backends)):
                for batch in dict.fromkeys(request.batches or sweep.batches):
                    for context in dict.fromkeys(request.contexts or sweep.contexts):
                        # One rank is the whole model whatever the strategy, so it is measured once.
                        for strategy in found[:1] if ranks == 1 else found:
                            expect = (
                                "ok" if ranks == 1 else sweep.expect.get(strategy.name, strategy.expected)
                            )
                            name = f"{model.label} {strategy.name} N={ranks} {backend} B={batch} C={context}"
                            digest = hashlib.sha256(json.dumps([model.to_json(), name]).encode()).hexdigest()[
                                :8
                            ]
                            cases.append(
                                Case(
                                    id=f"{name} {digest}",
                                    model=index,
                                    strategy=strategy.name,
                                    ranks=ranks,
                                    backend=backend,
                                    batch=batch,
                                    context=context,
                                    expect=expect,
                                )
                            )
    for name in sweep.expect:
        if name not in known:
            raise UsageError(
                f"an outcome is expected of {name!r}, which is not run; strategies: {', '.join(known)}"
            )
    return cases
