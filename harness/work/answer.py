"""One rank of a split model that answers a prompt."""

from __future__ import annotations

import mlx.core as mx

from harness import exchange, measure
from harness.work.base import Worker
from sharding.forward import make_cache
from sharding.strategies import resolve


class AnswerWorker(Worker):
    """One rank of a split model that answers a prompt."""

    def main(self) -> int:
        """Load, read the prompt, decode greedily until a stop token."""
        group = exchange.connect(self.context)
        strategy = resolve(self.work["strategy"], self.source.model_type)
        model = strategy.apply(self.whole(self.source.dtype), group)
        cache = make_cache(model)
        exchange.barrier(group)
        y, _ = measure.prefill(model, cache, mx.array([self.work["ids"]]))
        ids: list[int] = []
        while len(ids) < self.work["tokens"] and _first(y) not in self.work["stop"]:
            ids.append(_first(y))
            y = measure.step(model, cache, y)
            mx.eval(y)
        self.say("answer", ids=ids)
        return 0


def _first(tokens: mx.array) -> int:
    """The one token of a batch of one."""
    ids: list[int] = tokens.tolist()  # type: ignore[assignment]
    return ids[0]
