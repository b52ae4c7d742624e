"""A run into asv's own tree, so that `asv show`, `asv compare` and `asv publish` read what `shardbench run` wrote.

Everything asv reads is made by asv's own classes (`Results`, `Machine`, `Benchmarks`), from a benchmark description
that asv_runner itself makes of the classes in `harness.series`. `harness.asvtree` adds what asv leaves out: a
lock between writers, and files that appear whole or not at all.

A point that ran right has its samples and their median (seconds: asv takes lower for better everywhere). One that was
wrong, crashed or hung is null, asv's "failed"; one that is infeasible, unreachable or was never tried is NaN, "n/a".
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness import environment as conditions
from harness import series as known_series
from harness.asvtree import Busy, Tree, first_line, locked, unreadable
from harness.runs import RunStore, write_atomic
from harness.series import Series

FAILED = frozenset({"wrong", "crashed", "hung"})
REQUIREMENTS = ("mlx", "mlx-lm", "mlx-vlm")


@dataclass(frozen=True)
class Added:
    """What `add_run` did: the files it wrote (relative to the results folder), and what the user should know."""

    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def add_run(results_dir: Path, run: RunStore, lock_seconds: float = 60.0) -> Added:
    """Write the records of `run` into asv's tree under `results_dir`.

    Adding a run again writes the same again; points of the same commit, machine and environment replace each other,
    other points stay.

    Args:
        results_dir: asv's `results_dir`.
        run: the run; its environment record names the commit.
        lock_seconds: how long to wait for another process that is writing the tree.

    Whatever keeps a run out of the history is a note and no error: its records are safe in its own folder.
    """
    environment = run.environment()
    git = environment.get("git") or {}
    if not git.get("commit") or not git.get("commit_time"):
        return Added(notes=(f"not added to asv's history: {git.get('note') or 'the run names no commit'}",))
    points: dict[str, dict[known_series.Point, dict[str, Any]]] = {}
    added: list[Series] = []
    notes = []
    for record in run.records():
        try:
            one, point = known_series.series_of(record), known_series.point_of(record)
        except (KeyError, TypeError, ValueError) as error:
            notes.append(f"case {record['case']} is not in asv's history: {type(error).__name__} {error}")
            continue
        added.append(one)
        points.setdefault(one.name, {})[point] = record
    if not added:
        return Added(notes=(*notes, "not added to asv's history: the run has no records"))
    try:
        results_dir.mkdir(parents=True, exist_ok=True)
        with locked(results_dir, lock_seconds) as tree:
            tree.notes += notes
            mine = _add_series(tree, added)
            benchmarks = _write_benchmarks(tree, mine)
            machine = _write_machine(tree, environment)
            _extend_old_results(tree, mine, benchmarks)
            _write_results(tree, environment, machine, mine, benchmarks, points)
    except Busy:
        notes.append(
            f"not added to asv's history: another process has been writing {results_dir} for {lock_seconds:.0f} s; "
            f"when it has ended, `shardbench run --resume {run.run_id}` adds it"
        )
        return Added(notes=tuple(notes))
    except OSError as error:
        notes.append(f"not added to asv's history: can't write {results_dir}: {error.strerror or error}")
        return Added(notes=tuple(notes))
    return Added(files=tuple(tree.files), notes=tuple(tree.notes))


def machine_name(environment: Mapping[str, Any]) -> str:
    """Return the name of asv's folder for the machine: the cluster's name, or else the host's, safe as a file name."""
    cluster = environment.get("cluster")
    name = cluster.get("name") if isinstance(cluster, Mapping) else cluster
    name = str(name or (environment.get("machine") or {}).get("name") or "unknown")
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".-") or "unknown"
    return f"{safe}-host" if safe in ("runs", "benchmarks") else safe


def environment_axes(environment: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return (requirements, variables): what asv keeps apart, beside the machine, when it draws and compares.

    Library versions, the BLAS, a dirty tree, thread counts and every MLX_* setting make series of their own.
    """
    versions = environment.get("versions") or {}
    requirements = {name: str(versions[name]) for name in REQUIREMENTS if versions.get(name)}
    blas = environment.get("blas") or {}
    if blas.get("name") not in (None, "none"):
        requirements["blas"] = "-".join(str(blas[key]) for key in ("name", "version") if blas.get(key))
    if (environment.get("git") or {}).get("dirty"):
        requirements["tree"] = "dirty"
    variables = {**(environment.get("threads") or {}), **(environment.get("mlx_variables") or {})}
    return requirements, {
        name: str(value)
        for name, value in sorted(variables.items())
        if name not in conditions.PLACE_VARIABLES
    }


def _add_series(tree: Tree, added: list[Series]) -> dict[str, Series]:
    """Write the series file and return the series of this run with their whole grids."""
    old = known_series.known(tree.root)
    everything = known_series.unite([*old.values(), *_series_in_tree(tree, set(old)), *added])
    text = "".join(f"{one.to_json()}\n" for one in everything.values()).encode()
    path = tree.root / known_series.FILE
    if not path.is_file() or path.read_bytes() != text:
        write_atomic(path, text)
        tree.files.append(Path(known_series.FILE))
    return {one.name: everything[one.name] for one in added}


def _series_in_tree(tree: Tree, known: set[str]) -> Iterator[Series]:
    """Yield series that benchmarks.json declares and the series file has lost (deleted, or spoilt by a merge)."""
    try:
        declared = json.loads((tree.root / "benchmarks.json").read_bytes())
        entries = [entry for name, entry in declared.items() if name.startswith("decode.")]
    except (OSError, ValueError, AttributeError):
        return
    for entry in entries:
        name = str(entry["name"]).split(".")[1]
        if name in known or tuple(entry.get("param_names", ())) != known_series.PARAM_NAMES:
            continue
        strategies, worlds, batches, contexts = entry["params"]
        title = str(entry.get("pretty_name") or name).removeprefix("seconds per decode step: ")
        grid = (_unquote(strategies), _unquote(worlds), tuple(map(int, batches)), tuple(map(int, contexts)))
        yield Series(name, title, grid)


def _unquote(values: list[str]) -> tuple[str, ...]:
    import ast

    return tuple(str(ast.literal_eval(value)) for value in values)


def _write_benchmarks(tree: Tree, mine: Mapping[str, Series]) -> dict[str, dict[str, Any]]:
    """Declare the series in benchmarks.json, as discovery would, and return the declarations by name."""
    from asv.benchmarks import Benchmarks

    conf = SimpleNamespace(results_dir=str(tree.root), benchmark_dir="bench")
    declared: dict[str, dict[str, Any]] = {}
    path = tree.root / "benchmarks.json"
    if path.is_file():
        try:
            declared = dict(Benchmarks.load(conf))
        except unreadable() as error:
            tree.set_aside(path, first_line(error))
            mine = known_series.known(tree.root)
    for one in mine.values():
        for kind in known_series.KINDS:
            benchmark = _declaration(kind, one)
            declared[benchmark["name"]] = benchmark
    conf.results_dir = str(tree.staging)
    Benchmarks(conf, [declared[name] for name in sorted(declared)]).save()
    tree.publish(Path("benchmarks.json"))
    return declared


def _declaration(kind: str, one: Series) -> dict[str, Any]:
    """Return what asv_runner's discovery reports of the series' class."""
    from asv_runner.benchmarks.track import TrackBenchmark

    instance = known_series.benchmark_class(kind, one)()
    function = getattr(instance, known_series.KINDS[kind])
    benchmark = TrackBenchmark(known_series.benchmark_name(kind, one), function, [function, instance])
    kept = (str, int, float, list, dict, bool)
    return {k: v for k, v in vars(benchmark).items() if isinstance(v, kept) and not k.startswith("_")}


def _write_machine(tree: Tree, environment: Mapping[str, Any]) -> dict[str, str]:
    """Write machine.json and return the machine's facts.

    Each fact is an axis of asv's graphs. An update of the operating system must not end a graph, so the facts on
    file stay as long as the hardware is the same.
    """
    from asv.machine import Machine
    from asv.util import load_json

    ranks = environment.get("ranks") or []
    # In a cluster what was measured is the ranks' machine, not the one that gave the command.
    source = (ranks[0].get("machine") if environment.get("cluster") and ranks else None) or environment.get(
        "machine"
    )
    source = source or {}
    facts = {
        "machine": machine_name(environment),
        "os": str(source.get("os") or ""),
        "arch": str(source.get("arch") or ""),
        "cpu": str(source.get("chip") or ""),
        "num_cpu": str(source.get("cores") or ""),
        "ram": f"{round((source.get('memory_bytes') or 0) / 2**30)} GiB",
    }
    relative = Path(facts["machine"]) / "machine.json"
    path = tree.root / relative
    if path.is_file():
        try:
            on_file = load_json(str(path), Machine.api_version)
            on_file.pop("version", None)
            if {**on_file, "os": ""} == {**facts, "os": ""}:
                return {str(k): str(v) for k, v in on_file.items()}
            tree.notes.append(
                f"{relative}: the hardware of {facts['machine']} has changed; its graphs begin anew"
            )
        except unreadable() as error:
            tree.set_aside(path, first_line(error))
    machine = Machine()
    vars(machine).update(facts)
    machine.save(str(tree.staging))
    tree.publish(relative)
    return facts


def _write_results(
    tree: Tree,
    environment: Mapping[str, Any],
    machine: Mapping[str, str],
    mine: Mapping[str, Series],
    benchmarks: Mapping[str, dict[str, Any]],
    points: Mapping[str, Mapping[known_series.Point, Mapping[str, Any]]],
) -> None:
    """Merge this run's points into the result file of its commit, machine and environment."""
    from asv.environment import get_env_name
    from asv.results import Results, get_filename

    git = environment["git"]
    requirements, variables = environment_axes(environment)
    python = ".".join(str((environment.get("versions") or {}).get("python") or "").split(".")[:2])
    env_name = get_env_name("shardbench", python, requirements, {("run", k): v for k, v in variables.items()})
    relative = Path(get_filename(machine["machine"], git["commit"], env_name))
    path = tree.root / relative
    results = None
    if path.is_file():
        try:
            results = Results.load(str(path), machine_name=machine["machine"])
        except unreadable() as error:
            tree.set_aside(path, first_line(error))
    if results is not None and results.commit_hash != git["commit"]:
        tree.notes.append(
            f"not added to asv's history: {relative} belongs to commit {results.commit_hash}, whose first eight "
            f"digits are those of {git['commit']}"
        )
        return
    if results is None:
        params = {**machine, "python": python, **requirements}
        date = int(git["commit_time"]) * 1000
        results = Results(params, requirements, git["commit"], date, python, env_name, variables)
    for name, one in mine.items():
        for kind in known_series.KINDS:
            cells = {point: _cell(kind, record) for point, record in points[name].items()}
            if any(cell.samples for cell in cells.values()) or kind == "decode":
                benchmark = benchmarks[known_series.benchmark_name(kind, one)]
                _put(results, benchmark, cells, _moments(points[name].values()))
    results.save(str(tree.staging))
    tree.publish(relative)


def _extend_old_results(
    tree: Tree, mine: Mapping[str, Series], benchmarks: Mapping[str, dict[str, Any]]
) -> None:
    """Mark points that are new in a grid as not tried in older results, which asv would else show as failed."""
    from asv.results import Results

    for path in sorted(tree.root.glob("*/*.json")):
        # runs/ and staging hold no machine.json; asv too takes a folder without one for something else.
        if path.name == "machine.json" or not path.with_name("machine.json").is_file():
            continue
        try:
            results = Results.load(str(path), machine_name=path.parent.name)
        except unreadable() as error:
            tree.notes.append(f"asv will pass over {path.relative_to(tree.root)}: {first_line(error)}")
            continue
        changed = False
        for one, kind in itertools.product(mine.values(), known_series.KINDS):
            benchmark = benchmarks[known_series.benchmark_name(kind, one)]
            name = benchmark["name"]
            if (
                name not in results.get_all_result_keys()
                or results.benchmark_version.get(name) != known_series.VERSION
            ):
                continue
            if results.get_result_params(name) != benchmark["params"]:
                _put(results, benchmark, {}, (results.started_at.get(name), results.duration.get(name)))
                changed = True
        if changed:
            results.save(str(tree.staging))
            tree.publish(path.relative_to(tree.root))


@dataclass(frozen=True)
class _Cell:
    """One point as asv stores it: samples in seconds, or none with None (failed) or NaN (not tried)."""

    samples: tuple[float, ...] = ()
    value: float | None = math.nan


def _cell(kind: str, record: Mapping[str, Any]) -> _Cell:
    if record["outcome"] in FAILED:
        return _Cell(value=None)
    if record["outcome"] != "ok":
        return _Cell()
    samples = (record.get("samples") or {}).get(kind)
    if not samples:
        alone = record.get("seconds_per_step" if kind == "decode" else "prefill_seconds")
        samples = [alone] if alone is not None else []
    return _Cell(samples=tuple(float(value) for value in samples))


def _put(
    results: Any,
    benchmark: Mapping[str, Any],
    cells: Mapping[known_series.Point, _Cell],
    moments: tuple[int | None, float | None],
) -> None:
    """Give `results` the cells of one benchmark, keep its other points, and mark as not tried what it never had."""
    from asv.runner import BenchmarkResult

    name = benchmark["name"]
    had: set[tuple[str, ...]] = set()
    if name in results.get_all_result_keys() and results.benchmark_version.get(name) == benchmark["version"]:
        had = set(itertools.product(*results.get_result_params(name)))
    by_repr = {tuple(repr(value) for value in point): cell for point, cell in cells.items()}
    grid = list(itertools.product(*benchmark["params"]))
    chosen = [by_repr.get(point, _Cell()) for point in grid]
    started, duration = moments
    results.add_result(
        benchmark,
        BenchmarkResult(
            # asv computes the median itself where there are samples; what stands here just must not be missing.
            result=[cell.samples[0] if cell.samples else cell.value for cell in chosen],
            samples=[list(cell.samples) or None for cell in chosen],
            # Each sample is one step: `number` is what asv divides by. Without samples nothing is computed.
            number=[1 if cell.samples else None for cell in chosen],
            errcode=0,
            stderr="",
            profile=None,
        ),
        started_at=datetime.fromtimestamp(started / 1000, UTC) if started is not None else None,
        duration=duration,
        record_samples=True,
        selected_idx={index for index, point in enumerate(grid) if point in by_repr or point not in had},
    )


def _moments(records: Any) -> tuple[int | None, float | None]:
    """Return (start in milliseconds since 1970, duration in seconds) of the records of one series."""
    starts, ends = [], []
    for record in records:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            start, end = (datetime.fromisoformat(record[name]).timestamp() for name in ("started", "ended"))
            starts.append(start)
            ends.append(end)
    if not starts:
        return None, None
    return int(min(starts) * 1000), max(ends) - min(starts)
