"""Strategies that misbehave in every way that a user's own code may: `--strategy rude:name`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

NUMBER = 3
GO = Path(__file__).with_name("go")
"""`waits` goes on when this file is there."""


def real(group: Any) -> bool:
    """Whether this is a rank, and not somebody who only wants to know the plan."""
    return isinstance(group, mx.distributed.Group)


def fine(model: Any, group: Any) -> None:
    """The model's own split, with some noise on stdout."""
    print("fine: splitting", flush=True)
    model.shard(group)


def raises(model: Any, group: Any) -> None:
    """An exception of several lines."""
    raise RuntimeError("no way\nto split this")


def raises_on_one(model: Any, group: Any) -> None:
    """Only rank 1 fails, and only for real."""
    if real(group) and group.rank() == 1:
        raise RuntimeError("not on this rank")
    model.shard(group)


def exits(model: Any, group: Any) -> None:
    """Ends whoever calls it, without a word, at once."""
    os._exit(7)


def leaves(model: Any, group: Any) -> None:
    """Asks the interpreter to end, with success."""
    sys.exit(0)


def dies_loading(model: Any, group: Any) -> None:
    """Rank 1 is killed while it loads."""
    model.shard(group)
    if real(group) and group.rank() == 1:
        mx.eval(model.layers[0].parameters())
        os.kill(os.getpid(), signal.SIGKILL)


def sleeps(model: Any, group: Any) -> None:
    """Never returns, whoever asks."""
    time.sleep(600)


def waits(model: Any, group: Any) -> None:
    """As `fine`, but a rank waits until it is told to go on."""
    while real(group) and not GO.exists():
        time.sleep(0.05)
    model.shard(group)


def nonsense(model: Any, group: Any) -> Any:
    """No module."""
    return {"weights": 5}


def wrong(model: Any, group: Any) -> None:
    """Runs well, and computes something else."""
    model.shard(group)
    model.model.norm.weight = model.model.norm.weight * 1.5


def wrong_on_one(model: Any, group: Any) -> None:
    """Runs well, and rank 1 computes something else."""
    model.shard(group)
    if group.rank() == 1:
        model.model.norm.weight = model.model.norm.weight * 1.5


def not_numbers(model: Any, group: Any) -> None:
    """NaN everywhere."""
    model.shard(group)
    model.model.norm.weight = model.model.norm.weight * float("nan")


class Ends(nn.Module):
    """A norm at which rank 1 ends, in the given way."""

    def __init__(self, inner: nn.Module, group: Any, how: str) -> None:
        super().__init__()
        self.inner, self.group, self.how = inner, group, how

    def __call__(self, x: mx.array) -> Any:
        if real(self.group) and self.group.rank() == 1:
            if self.how == "raise":
                raise ValueError("in the middle of a forward pass")
            os._exit(9)
        return self.inner(x)


def raises_computing(model: Any, group: Any) -> None:
    """Rank 1 raises in a forward pass, while its peer waits in a collective."""
    model.shard(group)
    model.layers[0].post_attention_layernorm = Ends(model.layers[0].post_attention_layernorm, group, "raise")


def exits_computing(model: Any, group: Any) -> None:
    """Rank 1 ends in a forward pass, while its peer waits in a collective."""
    model.shard(group)
    model.layers[0].post_attention_layernorm = Ends(model.layers[0].post_attention_layernorm, group, "exit")
