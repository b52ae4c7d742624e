"""One rank of a split model: load every strategy, prove who the ranks are, check each, time those that are right."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from harness import blas, environment, equivalence, exchange, measure, precision
from harness.ragged import RaggedReference, include_ragged
from harness.reference import Reference
from harness.work.base import Shape, Worker, one_line, prompt_of
from harness.work.launcher_meter import LauncherMeter
from sharding.apply import Pool
from sharding.errors import Rejected
from sharding.forward import logits_of, make_cache
from sharding.strategies import Strategy, resolve
from sharding.trace import counting


class RanksWorker(Worker):
    """One rank of the split model."""

    def main(self) -> int:
        """Load, prove, check, time."""
        self.say("rank", view=environment.rank_view(blas.loaded_blas()))
        self.group = exchange.connect(self.context)
        self.strategies = [resolve(name, self.source.model_type) for name in self.work["strategies"]]
        self.together = self.work["interleaving"] == "burst"
        # Equal slices of several strategies are held once, where the models are held together at all.
        self.pool: Pool | None = Pool() if self.together else None
        self.models: dict[str, nn.Module] = {}
        jobdir = self.context.jobdir
        self.reference = Reference.load(jobdir / "check.safetensors")
        self.ragged = (
            RaggedReference.load(jobdir / "ragged.safetensors")
            if (jobdir / "ragged.safetensors").exists()
            else None
        )
        self.at_shape = {s: Reference.load(jobdir / f"{s.name}.safetensors") for s in self.shapes}
        self.wrong_at: list[list[Any]] = []
        right = [strategy for strategy in self.strategies if self._check(strategy)]
        self.pool = None  # it would keep the arrays of strategies that are not timed
        del self.reference, self.ragged
        gc.collect()
        for shape in self.shapes:
            able = [s for s in right if [s.name, shape.batch, shape.context] not in self.wrong_at]
            if able and self.work["measure"]:
                self._time(able, shape)
        return 0

    def _load(self, strategy: Strategy, dtype: str) -> nn.Module:
        pool = self.pool if dtype == self.source.dtype else None
        before, shared = mx.get_active_memory(), pool.shared_bytes if pool is not None else 0
        mx.reset_peak_memory()
        start = time.perf_counter()
        model = strategy.apply(
            self.whole(dtype),
            self.group,
            pool=pool,
            progress=lambda: self.sometimes("progress", what=f"load {strategy.name}"),
        )
        self.say(
            "loaded",
            strategy=strategy.name,
            seconds=time.perf_counter() - start,
            # Of this model alone: those loaded before it are held beside it.
            peak_bytes=max(0, mx.get_peak_memory() - before),
            shared_bytes=pool.shared_bytes - shared if pool is not None else 0,
        )
        return model

    def _attempt(
        self, strategy: Strategy, what: str, work: Callable[[], Any], shape: Shape | None = None
    ) -> Any:
        """Run a piece of foreign or fallible work on every rank; None when any rank failed, which is told.

        With a shape, only the case of that shape has failed.
        """
        result = None
        reason = ""
        place = {"strategy": strategy.name, "shape": shape and [shape.batch, shape.context]}
        try:
            result = work()
        except Rejected as rejected:
            self.say("failed", **place, outcome="infeasible", reason=str(rejected))
            reason = str(rejected)
        except (
            Exception,
            SystemExit,
        ) as error:  # Foreign code may raise anything: the log has the traceback.
            traceback.print_exc()
            reason = f"{what} raised {one_line(error)}"
            self.say("failed", **place, outcome="crashed", reason=reason)
        failed = exchange.any_rank(self.group, bool(reason))
        if failed and not reason:
            self.say("failed", **place, outcome="crashed", reason=f"{what} failed on another rank")
        return None if failed else result

    def _check(self, strategy: Strategy) -> bool:
        """Load and check one strategy in float32; whether it may be timed."""
        self.begin("load", [strategy.name])
        model = self._attempt(strategy, strategy.name, lambda: self._load(strategy, "float32"))
        if model is None:
            return False
        whose = f"{strategy.name}'s model"
        self.begin("check", [strategy.name])
        report = self._attempt(strategy, whose, lambda: self._report(model))
        if report is None:
            return False
        counts = self._attempt(strategy, whose, lambda: self._count(model))
        if counts is None:
            return False
        counted, payload = counts
        self.say("checked", strategy=strategy.name, report=report.to_json(), counted=counted, payload=payload)
        planned = self.work["planned"].get(strategy.name)
        fine = report.outcome == "ok" and (
            planned is None or [counted, payload] == planned[self.context.rank]
        )
        same = exchange.equal(self.group, report.tokens_digest)
        if exchange.any_rank(self.group, not fine) or not same:
            return False
        for shape in self.shapes:
            if not self._check_shape(strategy, model, shape):
                self.wrong_at.append([strategy.name, shape.batch, shape.context])
        if self.source.dtype != "float32":
            del model
            model = self._low_precision(strategy)
            if model is None:
                return False
        if self.together:
            self.models[strategy.name] = model
        return True

    def _report(self, model: nn.Module) -> equivalence.Report:
        report = equivalence.verify(model, self.reference)
        return include_ragged(report, model, self.ragged) if self.ragged is not None else report

    def _count(self, model: nn.Module) -> tuple[dict[str, int], int]:
        """Collectives of one decode step at batch 1, and the bytes that this rank hands in."""
        mx.disable_compile()
        try:
            cache = make_cache(model)
            mx.eval(logits_of(model(mx.array([[1]]), cache=cache)))
            with counting() as recording:
                mx.eval(logits_of(model(mx.array([[1]]), cache=cache)))
        finally:
            mx.enable_compile()
        return recording.counts(), recording.payload()

    def _check_shape(self, strategy: Strategy, model: nn.Module, shape: Shape) -> bool:
        report = self._attempt(
            strategy,
            f"{strategy.name}'s model",
            lambda: equivalence.verify(model, self.at_shape[shape]),
            shape,
        )
        if report is None:
            return False
        same = exchange.equal(self.group, report.tokens_digest)
        self.say(
            "shape_checked",
            strategy=strategy.name,
            shape=[shape.batch, shape.context],
            report=report.to_json(),
        )
        return not exchange.any_rank(self.group, report.outcome != "ok") and same

    def _low_precision(self, strategy: Strategy) -> nn.Module | None:
        """The model in the timed dtype, checked statistically against the unsharded one in that dtype."""
        model = self._attempt(strategy, strategy.name, lambda: self._load(strategy, self.source.dtype))
        if model is None:
            return None
        own = self._attempt(
            strategy, f"{strategy.name}'s model", lambda: precision.spread(model, self.reference)
        )
        if own is None:
            return None
        reasons = precision.check_spread(own, precision.Spread(**self.work["spread"]))
        self.say("spread_checked", strategy=strategy.name, rms=own.rms, kl=own.kl)
        if reasons:
            self.say("failed", strategy=strategy.name, outcome="wrong", reason=reasons[0])
        return None if exchange.any_rank(self.group, bool(reasons)) else model

    def _time(self, strategies: list[Strategy], shape: Shape) -> None:
        names = [s.name for s in strategies]
        self.begin("time", names, shape)
        prompts = [
            prompt_of(self.work, shape.batch, shape.context, repeat)
            for repeat in range(1 + self.settings["prefills"])
        ]
        launcher = LauncherMeter(self.context)
        exchange.barrier(self.group)
        with self.heartbeat():
            if self.together:
                chosen = {name: self.models[name] for name in names}
                prefills, streams = measure.prefills(chosen, prompts, clock=self.clock)
                decodes = {
                    name: [series]
                    for name, series in measure.interleave(
                        list(streams.values()),
                        self.settings["steps"],
                        self.settings["warmup"],
                        burst=self.settings["burst"],
                        clock=self.clock,
                    ).items()
                }
            else:
                prefills, decodes = self._one_at_a_time(strategies, prompts, shape)
        used = launcher.stop()
        for name in names:
            warm = [s for series in decodes[name] for s in series.warmup]
            seconds = [s for series in decodes[name] for s in series.seconds]
            self.say(
                "timed",
                strategy=name,
                shape=[shape.batch, shape.context],
                decode=seconds,
                warmup=warm,
                prefill=list(prefills[name].seconds),
                prefill_warmup=list(prefills[name].warmup),
                tokens_per_second=shape.batch * len(seconds) / sum(seconds),
                tokens_digest=[series.tokens_digest for series in decodes[name]],
                interleaving=("burst" if self.together else "abba") if len(names) > 1 else "single",
                launcher=used,
            )

    def _one_at_a_time(
        self, strategies: list[Strategy], prompts: list[mx.array], shape: Shape
    ) -> tuple[dict[str, measure.Prefill], dict[str, list[measure.Series]]]:
        found: dict[str, list[measure.Prefill]] = {s.name: [] for s in strategies}

        def builder(strategy: Strategy) -> Callable[[], measure.Stream]:
            def build() -> measure.Stream:
                model = self._load(strategy, self.source.dtype)
                if self.source.dtype == "float32":  # foreign code may do something else the second time
                    report = equivalence.verify(model, self.at_shape[shape])
                    if report.outcome != "ok":
                        raise RuntimeError(f"{strategy.name} loaded again is wrong: {report.reasons[0]}")
                exchange.barrier(self.group)
                prefills, streams = measure.prefills({strategy.name: model}, prompts, clock=self.clock)
                found[strategy.name].append(prefills[strategy.name])
                return streams[strategy.name]

            return build

        decodes = measure.blocks(
            {s.name: builder(s) for s in strategies},
            self.settings["steps"],
            self.settings["warmup"],
            clock=self.clock,
        )
        joined = {
            name: replace(
                several[0],
                warmup=tuple(t for one in several for t in one.warmup),
                seconds=tuple(t for one in several for t in one.seconds),
            )
            for name, several in found.items()
        }
        return joined, decodes
