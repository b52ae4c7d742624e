"""`plan`: one row for each strategy, world size, batch and context, from a config alone.

Built-in strategies answer from their tables, foreign code from a trace; both are laid on the same real
model, unevaluated. Each valid row is traced as well, and a table that disagrees with its trace is an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from sharding import costs, load
from sharding.apply import shard
from sharding.errors import Rejected
from sharding.families.registry import family_of
from sharding.plan import Reading
from sharding.source import DTYPES, Source
from sharding.strategies import Strategy
from sharding.trace import StandInGroup, StepTrace, cache_arrays, trace_step, tracing
from sharding.tree import clone


class TableError(AssertionError):
    """A family's table and the trace of the model it split disagree: a fault of this project."""


@dataclass(frozen=True)
class Row:
    """One line of `plan`.

    Per token means per decode step of the whole batch. Lists have one entry a rank.
    """

    model: str
    model_type: str
    family: str
    strategy: str
    ranks: int
    batch: int
    context: int
    dtype: str
    quantization: str | None
    valid: bool
    reasons: tuple[str, ...]
    traced: bool
    parameters: int
    collectives_per_token: dict[str, int] | None = None
    bytes_per_token: int | None = None
    collectives_per_rank: tuple[dict[str, int], ...] = ()
    bytes_per_rank: tuple[int, ...] = ()
    weight_bytes_per_rank: tuple[int, ...] = ()
    replicated_weight_bytes_per_rank: tuple[int, ...] = ()
    weight_bytes_read_per_token: tuple[int, ...] = ()
    cache_bytes_per_rank: tuple[int, ...] = ()
    load_peak_bytes_per_rank: tuple[int, ...] = ()
    fits: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        """The inverse of `to_json`, also after JSON has made lists of the tuples."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**fields)


def make_rows(
    source: Source,
    strategies: Sequence[Strategy],
    ranks: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    memory: int | None = None,
) -> list[Row]:
    """The plan of every combination, in the order given, strategies outermost.

    Args:
        source: The model; its weights are not touched.
        strategies: What to try.
        ranks: World sizes.
        batches: Sequences decoded at once.
        contexts: Tokens in the cache before the step.
        memory: Bytes of one host that weights, cache and loading may use; None leaves `fits` open.
    """
    planner = _Planner(source, memory)
    return [
        planner.row(strategy, n, batch, context)
        for strategy in strategies
        for n in ranks
        for batch in batches
        for context in contexts
    ]


def check(source: Source) -> None:
    """Build the whole model and run one step of it, unevaluated.

    Raises:
        BadRequest: It can't be built, or its config is not consistent.
    """
    _Planner(source, None).check()


def refused(
    source: Source,
    strategy: Strategy,
    ranks: int,
    batches: Sequence[int],
    contexts: Sequence[int],
    reason: str,
) -> list[Row]:
    """Rows that say why there is no plan, without asking the strategy again."""
    planner = _Planner(source, None)
    return [
        Row(**planner.common(strategy, ranks, batch, context), valid=False, reasons=(reason,))
        for batch in batches
        for context in contexts
    ]


class _Planner:
    def __init__(self, source: Source, memory: int | None) -> None:
        self.source = source
        self.memory = memory
        family = family_of(source.model_type)
        self.integers = family.integers if family else {}
        self.model = load.lazy(source, values=False)
        named = source.config.get("tie_word_embeddings")
        self.tied = named if isinstance(named, bool) else None
        self.whole = costs.parameters(self.model, self.integers, self.tied)
        self.quantising = bool(
            source.quantize or (source.folder is None and source.config.get("quantization"))
        )
        self._readings: dict[str, Reading] = {}
        self._steps: dict[int, StepTrace] = {}
        self._caches: dict[tuple[int, int], list[int]] = {}
        self.top_k = int(source.config.get("num_experts_per_tok") or 0)

    def check(self) -> None:
        """Raise BadRequest unless the whole model runs."""
        self._step_of_whole(1)

    def common(self, strategy: Strategy, ranks: int, batch: int, context: int) -> dict[str, Any]:
        """The fields that a row has whatever the plan says."""
        return {
            "model": self.source.label,
            "model_type": self.source.model_type,
            "family": strategy.family,
            "strategy": strategy.name,
            "ranks": ranks,
            "batch": batch,
            "context": context,
            "dtype": self.source.dtype,
            "quantization": self.source.quantization,
            "traced": strategy.foreign,
            "parameters": sum(p.count for p in self.whole),
        }

    def row(self, strategy: Strategy, ranks: int, batch: int, context: int) -> Row:
        common = self.common(strategy, ranks, batch, context)
        try:
            self._step_of_whole(batch)  # a model that doesn't run whole has no plan
            if strategy.foreign and ranks > 1:
                return self._traced(strategy, ranks, batch, context, common)
            return self._planned(strategy, ranks, batch, context, common)
        except Rejected as rejected:
            return Row(**common, valid=False, reasons=tuple(rejected.reasons))

    def _planned(
        self, strategy: Strategy, ranks: int, batch: int, context: int, common: dict[str, Any]
    ) -> Row:
        counts: dict[str, int] = {}
        payload = 0
        if ranks == 1:
            weights = self._weights_of(self.whole, 1, batch)
            traced = self._step_of_whole(batch)
        else:
            if strategy.name not in self._readings:
                self._readings[strategy.name] = strategy.read(self.model)
            plan = self._readings[strategy.name].plan(ranks)
            weights = costs.planned_weights(self.whole, plan, batch, self.top_k, quantising=self.quantising)
            counts = dict(Counter(c.kind for c in plan.collectives))
            payload = sum(c.features for c in plan.collectives) * batch * DTYPES[self.source.dtype].size
            group = StandInGroup(0, ranks)
            with tracing(group) as recording:
                model = shard(clone(self.model), plan, group, evaluate=False)
                traced = trace_step(model, recording, batch)
        if (traced.counts(), traced.payload()) != (counts, payload):
            raise TableError(
                f"{strategy.family} {strategy.name} at {ranks} ranks: the table says {counts} and {payload} bytes "
                f"a step, the trace {traced.counts()} and {traced.payload()}"
            )
        # Shares are equal, so one rank's figures are every rank's.
        return self._row(common, context, [weights] * ranks, [traced] * ranks)

    def _traced(
        self, strategy: Strategy, ranks: int, batch: int, context: int, common: dict[str, Any]
    ) -> Row:
        """Every rank of a user's own code is traced; of upstream's the first and the last.

        mlx's `shard_linear` and `shard_inplace` split into equal parts or raise, so that upstream's ranks run
        the same graph on arrays of the same shapes. Should the two ends differ, all ranks are traced.
        """
        if not strategy.users_own:
            ends = [self._trace_rank(strategy, rank, ranks, batch) for rank in (0, ranks - 1)]
            if ends[0] == ends[1]:
                weights, step = ends[0]
                return self._row(common, context, [weights] * ranks, [step] * ranks)
        traced = [self._trace_rank(strategy, rank, ranks, batch) for rank in range(ranks)]
        return self._row(common, context, [weights for weights, _ in traced], [step for _, step in traced])

    def _trace_rank(
        self, strategy: Strategy, rank: int, ranks: int, batch: int
    ) -> tuple[costs.Weights, StepTrace]:
        group = StandInGroup(rank, ranks)
        with tracing(group) as recording:
            try:
                model = strategy.apply(clone(self.model), group, evaluate=False)
                own = costs.parameters(model, self.integers, self.tied)
                return self._weights_of(own, ranks, batch), trace_step(model, recording, batch)
            except Rejected:
                raise
            except (Exception, SystemExit) as error:  # Foreign code may raise anything.
                line = " ".join(str(error).split())
                raise Rejected([f"{strategy.name} raised {type(error).__name__}: {line}"]) from error

    def _weights_of(self, own: list[costs.Parameter], ranks: int, batch: int) -> costs.Weights:
        return costs.measured_weights(self.whole, own, ranks, batch, self.top_k, quantising=self.quantising)

    def _step_of_whole(self, batch: int) -> StepTrace:
        if batch not in self._steps:
            with tracing(StandInGroup(0, 1)) as recording:
                try:
                    self._steps[batch] = trace_step(self.model, recording, batch)
                except Exception as error:  # Whatever the model's own code raises on shapes that don't fit.
                    line = " ".join(str(error).split())
                    raise Rejected(
                        [f"the whole model's own forward pass fails ({type(error).__name__}: {line})"]
                    ) from error
        return self._steps[batch]

    def _cache_bytes(self, step: StepTrace, batch: int, context: int) -> int:
        """Bytes of one rank's cache at `context`: the whole model's, times this rank's share of each array.

        The share is read off the shapes after one step, where heads are the same part of the array as later.
        """
        if (batch, context) not in self._caches:
            with tracing(StandInGroup(0, 1)):
                arrays = cache_arrays(self.model, batch, context)
            self._caches[batch, context] = [array.nbytes for array in arrays]
        whole_step = self._step_of_whole(batch).cache
        full = self._caches[batch, context]
        if len(whole_step) == len(full) == len(step.cache):
            sizes = zip(full, step.cache, whole_step, strict=True)
            return sum(size * math.prod(own) // max(1, math.prod(whole)) for size, own, whole in sizes)
        own_elements = sum(math.prod(shape) for shape in step.cache)
        return sum(full) * own_elements // max(1, sum(math.prod(shape) for shape in whole_step))

    def _row(
        self, common: dict[str, Any], context: int, weights: list[costs.Weights], steps: list[StepTrace]
    ) -> Row:
        busiest = max(steps, key=StepTrace.payload)
        cache = tuple(self._cache_bytes(step, common["batch"], context) for step in steps)
        needed = [max(w.load_peak, w.held + c) for w, c in zip(weights, cache, strict=True)]
        fits = None if self.memory is None else max(needed) <= self.memory
        reasons: tuple[str, ...] = ()
        if fits is False and self.memory is not None:
            worst = needed.index(max(needed))
            reasons = (
                (
                    f"rank {worst} needs {max(needed) / 2**30:.1f} GiB (weights {weights[worst].held / 2**30:.1f}, "
                    f"cache {cache[worst] / 2**30:.1f}, loading peak {weights[worst].load_peak / 2**30:.1f}), "
                    f"a host has {self.memory / 2**30:.1f} GiB"
                ),
            )
        return Row(
            **common,
            valid=True,
            reasons=reasons,
            collectives_per_token=busiest.counts(),
            bytes_per_token=busiest.payload(),
            collectives_per_rank=tuple(step.counts() for step in steps),
            bytes_per_rank=tuple(step.payload() for step in steps),
            weight_bytes_per_rank=tuple(w.held for w in weights),
            replicated_weight_bytes_per_rank=tuple(w.replicated for w in weights),
            weight_bytes_read_per_token=tuple(w.read for w in weights),
            cache_bytes_per_rank=cache,
            load_peak_bytes_per_rank=tuple(w.load_peak for w in weights),
            fits=fits,
        )


def memory_of_device() -> int | None:
    """Bytes that Metal recommends one process to use, or None where there is no Metal device."""
    if not mx.metal.is_available():
        return None
    return int(mx.device_info()["max_recommended_working_set_size"])
