"""From the command line's options to what is asked: a model, or a sweep of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from harness.errors import UsageError
from harness.request import BACKENDS, ModelRequest, Outcome, Settings, Sweep
from harness.runs import OUTCOMES


def model_of(source: str, options: Mapping[str, Any]) -> ModelRequest:
    """SOURCE and its options as one model of a sweep."""
    pairs = {}
    for item in options["sets"]:
        key, equals, raw = item.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {item!r}: expected key=value")
        pairs[key] = raw
    return ModelRequest(
        source=source,
        set=pairs,
        layers=options["layers"],
        quantize=options["quantize"],
        dtype=options["dtype"],
        seed=options["seed"],
    )


def backend_of(cluster: Path) -> Sequence[str]:
    """What the ranks of a cluster talk over, as its file says.

    Raises:
        UsageError: Something that this release can't run.
    """
    from harness.cluster import load_cluster

    named = load_cluster(cluster).backend
    if named not in BACKENDS:
        raise UsageError(
            f"{cluster}: backend {named!r} is not available in this release; "
            f"give --backend {' or --backend '.join(BACKENDS)}"
        )
    return (named,)


def sweep_of(source: str, options: Mapping[str, Any]) -> Sweep:
    """The sweep that `run`'s options describe.

    Raises:
        UsageError: An `--expect` that names no outcome.
    """
    expected: dict[str, Outcome] = {}
    for item in options["expect"]:
        name, _, outcome = item.rpartition("=")
        if not name or outcome not in OUTCOMES:
            raise UsageError(
                f"--expect {item!r}: expected STRATEGY=OUTCOME, an outcome being {', '.join(OUTCOMES)}"
            )
        expected[name] = cast("Outcome", outcome)
    settings = {
        "steps": options["steps"],
        "prompt": options["prompt"],
        "deadline_seconds": options["deadline"],
        "stall_seconds": options["stall"],
    }
    return Sweep(
        models=(model_of(source, options),),
        strategies=tuple(options["strategy"]) if options["strategy"] else None,
        ranks=tuple(options["ranks"]),
        backends=tuple(options["backend"]),
        batches=tuple(options["batch"]),
        contexts=tuple(options["context"]),
        expect=expected,
        settings=Settings.model_validate(
            {name: value for name, value in settings.items() if value is not None}
        ),
    )
