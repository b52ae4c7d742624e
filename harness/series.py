"""The asv series of this project: which exist, and the benchmark classes that stand for them in bench/.

asv knows a result only while it can discover a benchmark of the same name and version, and forgets what bench/ no
longer declares each time `asv run` looks. What users measure is open-ended (any model, any strategy), so bench/ can't
list it: every run adds its series to results/series.jsonl, one JSON object a line, and bench/ makes a class of each.
The file is small, belongs in git wherever the results do, merges line by line, and is not named .json because asv takes
every .json file in its tree for a result.

One series is one model in one form (dtype, quantisation, cuts); its parameters are what is compared within it.
This module is what a process that only discovers benchmarks imports: the standard library and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "series.jsonl"
KINDS = {"decode": "track_seconds_per_step", "prefill": "track_seconds"}
PARAM_NAMES = ("strategy", "world", "batch", "context")
# Change it when what is measured changes its meaning: asv then ignores what was stored under the old one.
VERSION = "1"

Point = tuple[str, str, int, int]
Grid = tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Series:
    """One model in one form, and every value that each parameter has taken so far."""

    name: str
    title: str
    grid: Grid

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"a series is a class in bench/, so {self.name!r} can't be its name")
        if len(self.grid) != len(PARAM_NAMES) or not all(self.grid):
            raise ValueError(f"series {self.name} needs a value of each of {', '.join(PARAM_NAMES)}")
        if self.grid != _sorted_grid(self.grid):
            raise ValueError(f"the grid of series {self.name} must be sorted and without repeats")

    def united(self, other: Series) -> Series:
        """Return this series with the other's parameter values added."""
        grid = _sorted_grid(
            tuple((*mine, *theirs) for mine, theirs in zip(self.grid, other.grid, strict=True))
        )
        return Series(self.name, self.title, grid)

    def to_json(self) -> str:
        """Return the series as its line in the file."""
        grid = dict(zip(PARAM_NAMES, self.grid, strict=True))
        return json.dumps({"name": self.name, "title": self.title, "grid": grid}, ensure_ascii=False)


def point_of(record: Mapping[str, Any]) -> Point:
    """Return where a record lies in its series' grid."""
    ranks = int(record["ranks"])
    # One rank has no backend; more ranks are another point over another wire.
    world = "1" if ranks == 1 else f"{ranks} {record.get('backend') or 'none'}"
    return str(record["strategy"]), world, int(record["batch"]), int(record["context"])


def series_of(record: Mapping[str, Any]) -> Series:
    """Return the series of a record, its grid holding this one point."""
    label = str(record.get("model") or record.get("model_type") or "model")
    form = [str(record[name]) for name in ("dtype", "quantization") if record.get(name)]
    cuts = [str(cut) for cut in record.get("cuts") or []]
    digest = hashlib.sha256(json.dumps([label, form, cuts]).encode()).hexdigest()[:6]
    name = re.sub(r"\W+", "_", "_".join([label, *form]), flags=re.ASCII).strip("_")
    name = name if name[:1].isalpha() else f"m_{name}"
    title = ", ".join([label, *form]) + (f" (cut: {'; '.join(cuts)})" if cuts else "")
    strategy, world, batch, context = point_of(record)
    return Series(f"{name}_{digest}", title, ((strategy,), (world,), (batch,), (context,)))


def unite(series: Iterable[Series]) -> dict[str, Series]:
    """Return one series a name, in the order of the names, with all parameter values that occur."""
    found: dict[str, Series] = {}
    for one in series:
        found[one.name] = found[one.name].united(one) if one.name in found else one
    return dict(sorted(found.items()))


def known(results_dir: Path) -> dict[str, Series]:
    """Return the series in `results_dir`/series.jsonl by name; a damaged line costs that line only."""
    try:
        lines = (results_dir / FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
            grid = _sorted_grid(tuple(tuple(entry["grid"][name]) for name in PARAM_NAMES))
            found.append(Series(str(entry["name"]), str(entry["title"]), grid))
        except (ValueError, KeyError, TypeError):
            continue  # a merge conflict, say; `history.add_run` puts back what the result tree still knows
    return unite(found)


def benchmark_class(kind: str, series: Series) -> type:
    """Return the class that declares `series` to asv as a benchmark of bench/<kind>.py."""

    def track(self: object, strategy: str, world: str, batch: int, context: int) -> float:
        return (
            math.nan
        )  # asv's "n/a": only `shardbench run` starts ranks, and checks them before it times them

    # asv_runner takes the class's name for its listing from here.
    track.__qualname__ = f"{series.name}.{KINDS[kind]}"
    unit = "decode step" if kind == "decode" else "prefill"
    track.pretty_name = f"seconds per {unit}: {series.title}"  # type: ignore[attr-defined]
    attributes = {
        "__doc__": series.title,
        "params": [list(values) for values in series.grid],
        "param_names": list(PARAM_NAMES),
        "unit": "seconds",
        "version": VERSION,
        KINDS[kind]: track,
    }
    return type(series.name, (), attributes)


def benchmark_classes(kind: str, results_dir: Path) -> dict[str, type]:
    """Return the classes of all known series, by name, for a module of bench/ to take into its namespace."""
    return {name: benchmark_class(kind, series) for name, series in known(results_dir).items()}


def benchmark_name(kind: str, series: Series) -> str:
    """Return the name under which asv stores the series."""
    return f"{kind}.{series.name}.{KINDS[kind]}"


def _sorted_grid(grid: tuple[tuple[Any, ...], ...]) -> Grid:
    strategies, worlds, batches, contexts = grid
    return (
        tuple(sorted({str(value) for value in strategies})),
        tuple(sorted({str(value) for value in worlds}, key=_world_order)),
        tuple(sorted({int(value) for value in batches})),
        tuple(sorted({int(value) for value in contexts})),
    )


def _world_order(world: str) -> tuple[int, str]:
    ranks, _, backend = world.partition(" ")
    return int(ranks), backend
