"""What the subcommands do, once their options are read. Each returns the exit status."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from harness import ask
from harness.apart import plan_apart
from harness.cli import option_name, print_json
from harness.errors import UsageError
from harness.place import machine_memory, place
from harness.request import Case, Settings, Sweep, expand, parse_sweep, read_sweep
from harness.runs import RunStore
from harness.terminal import console
from sharding import rows, strategies
from sharding.source import Source

WITH_A_REQUEST = frozenset({"source", "resume", "cluster", "out", "as_json"})
"""Options of `run` that mean something beside a SWEEP.toml or a run to resume."""


def _user_path() -> None:
    """Let `module:function` be found from where the user stands, as `python -m` would."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def plan(
    source: str,
    ranks: Sequence[int],
    strategy: Sequence[str] | None,
    batch: Sequence[int],
    context: Sequence[int],
    memory: int | None,
    as_json: bool,
    **options: Any,
) -> int:
    """`shardbench plan`."""
    from harness import plan_table

    _user_path()
    model = ask.model_of(source, options).resolve(fetch_weights=False)
    names = strategy or strategies.built_in(model.model_type)
    found = [strategies.resolve(name, model.model_type) for name in names]
    made: list[rows.Row] = []
    limit = memory or machine_memory()
    for users_own, several in groupby(found, key=lambda one: one.users_own):
        if users_own:
            for one in several:
                for n in ranks:
                    made += plan_apart(model, one.name, n, batch, context, limit)
        else:
            made += rows.make_rows(model, list(several), ranks, batch, context, limit)
    if as_json:
        print_json({"rows": [row.to_json() for row in made], "cuts": model.cuts, "notes": model.notes})
    else:
        plan_table.show(made, model, console())
    return 0 if any(row.valid for row in made) else 1


def verify(
    source: str,
    strategy: str,
    ranks: int,
    batch: int,
    prompt_tokens: int,
    decode_tokens: int,
    prompt: str | None,
    backend: str,
    deadline: float,
    stall: float,
    keep_logs: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """`shardbench verify`."""
    from harness import progress
    from harness.sweep import Runner
    from harness.tokens import tokenize

    _user_path()
    model = ask.model_of(source, options).resolve()
    found = strategies.resolve(strategy, model.model_type)
    settings = Settings(
        check_batch=batch,
        check_prompt=prompt_tokens,
        check_decode=decode_tokens,
        prompt=prompt,
        deadline_seconds=deadline,
        stall_seconds=stall,
    )
    case = Case("verify", 0, found.name, ranks, "none" if ranks == 1 else backend, 1, 1, "ok")
    rows.check(model)
    if prompt is not None:
        tokenize(model, prompt)
    logs = _log_folder(keep_logs)
    records: list[dict[str, Any]] = []
    try:
        with place(None) as here, progress.display(1, f"verify {strategy}", quiet=as_json) as shown:
            Runner(here.place, [model], settings, logs, records.append, shown, measure=False).run([case])
    except BaseException:
        if keep_logs is None:
            shutil.rmtree(logs, ignore_errors=True)
        raise
    record = records[0]
    equivalence = dict(record.get("equivalence") or {})
    answer = {
        "outcome": record["outcome"],
        "reasons": record["reasons"],
        **{
            name: equivalence.get(name)
            for name in (
                "max_abs_diff",
                "relative_diff",
                "tolerance",
                "kl",
                "top1_agreement",
                "ranks_agree",
                "collectives_counted",
                "collectives_planned",
                "first_divergence",
            )
        },
        **{
            name: record[name]
            for name in ("model", "model_type", "family", "strategy", "ranks", "backend", "dtype")
        },
        "quantization": record["quantization"],
        "cuts": record["cuts"],
        "notes": [*record["notes"], *equivalence.get("notes", [])],
        "log": None,
    }
    if record["outcome"] in ("ok", "infeasible") and keep_logs is None:
        shutil.rmtree(logs, ignore_errors=True)
    else:
        answer["log"] = _last_log(logs)
    if as_json:
        print_json(answer)
    else:
        from harness import plan_table

        plan_table.show_verdict(answer, console())
    return 0 if record["outcome"] == "ok" else 1


def _log_folder(asked: Path | None) -> Path:
    """Where a check's logs go."""
    if asked is None:
        return Path(tempfile.mkdtemp(prefix="shardbench-verify-"))
    try:
        asked.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--keep-logs {asked}: not a usable folder ({error.strerror}); choose another"
        ) from None
    return asked


def _last_log(logs: Path) -> str | None:
    """The log that says most of what went wrong: the last job's first rank that has a traceback, else its first."""
    jobs = sorted(logs.glob("job-*"), key=lambda path: int(path.name.partition("-")[2]))
    found = sorted(jobs[-1].glob("rank-*/log")) if jobs else []
    telling = [path for path in found if b"Traceback" in path.read_bytes()]
    return str((telling or found)[0]) if found else None


def run(
    source: str | None,
    cluster: Path | None,
    out: Path,
    resume: str | None,
    as_json: bool,
    given: frozenset[str] = frozenset(),
    **options: Any,
) -> int:
    """`shardbench run`; `given` names the options that were written on the command line."""
    _user_path()
    complete = "--resume" if resume is not None else source if source and source.endswith(".toml") else None
    if complete and (more := sorted(given - WITH_A_REQUEST)):
        raise UsageError(
            f"{complete} holds the whole request, so {', '.join(map(option_name, more))} would change nothing: "
            f"leave {'it' if len(more) == 1 else 'them'} out"
        )
    store = None
    if resume is not None:
        if source is not None:
            raise UsageError(
                f"--resume {resume}: the run's own request is continued; leave SOURCE {source!r} out"
            )
        store = RunStore.find(out, resume)
        request = store.sweep()
        if cluster is None and request.get("cluster"):
            raise UsageError(
                f"--resume {resume}: it ran on cluster {request['cluster']}; give its file with --cluster"
            )
        sweep = parse_sweep(request["sweep"], str(store.path / "sweep.json"))
        models = [Source.from_json(model) for model in request["models"]]
    elif source is None:
        raise UsageError("SOURCE is missing; give a model, a SWEEP.toml, or --resume RUN")
    elif complete:
        sweep = read_sweep(Path(source))
        models = [model.resolve(Path(source).parent) for model in sweep.models]
    else:
        if cluster is not None and "backend" not in given:
            options["backend"] = ask.backend_of(cluster)
        sweep = ask.sweep_of(source, options)
        models = [model.resolve() for model in sweep.models]
    return execute(sweep, models, expand(sweep, models), store, cluster, out, as_json=as_json)


def execute(
    sweep: Sweep,
    models: list[Source],
    cases: list[Case],
    store: RunStore | None,
    cluster: Path | None,
    out: Path,
    *,
    as_json: bool = False,
    note: str | None = None,
) -> int:
    """Run the cases that a run still lacks, and show and keep what came of it."""
    from harness import environment, history, progress, report
    from harness.sweep import Runner
    from harness.tokens import tokenize

    for model in models:  # what can be refused is, before anything is written
        rows.check(model)
        if sweep.settings.prompt is not None:
            tokenize(model, sweep.settings.prompt)
    users_own = sorted({case.strategy for case in cases if ":" in case.strategy})
    if cluster is not None and users_own:
        raise UsageError(
            f"--cluster: {users_own[0]} is not brought to the host in this release; run it there without --cluster"
        )
    with place(cluster) as here:
        if store is None:
            request = {
                "sweep": sweep.model_dump(),
                "models": [model.to_json() for model in models],
                "cluster": here.cluster and here.cluster["name"],
                "note": note,
            }
            surroundings = environment.collect()
            if here.cluster is not None:
                surroundings["cluster"] = here.cluster
            store = RunStore.create(out, request, surroundings)
        with store:
            done = store.done()
            pending = [case for case in cases if case.id not in done]
            try:
                with progress.display(len(pending), f"run {store.run_id}", quiet=as_json) as shown:
                    run_store = store

                    def record(found: dict[str, Any]) -> None:
                        run_store.append(found)
                        shown({"event": "record", "outcome": found["outcome"]})

                    runner = Runner(here.place, models, sweep.settings, store.logs, record, shown)
                    runner.run(pending)
            except KeyboardInterrupt:
                console(stderr=True).print(
                    f"shardbench: interrupted; every case that ended is kept, continue with "
                    f"shardbench run --resume {store.run_id}"
                    + ("" if out == Path("results") else f" --out {out}"),
                    soft_wrap=True,
                )
                return 130
            if runner.views:
                store.write_environment(environment.with_ranks(store.environment(), runner.views))
    added = history.add_run(out, store)
    records = store.records()
    page = report.write_page([store], store.path / "report.html")
    if as_json:
        print_json(
            {"run": store.run_id, "path": str(store.path), "records": records, "notes": list(added.notes)}
        )
    else:
        out_console = console()
        report.terminal(records, out_console)
        for line in added.notes:
            out_console.print(line, style="dim", soft_wrap=True)
        out_console.print(f"records  {store.path / 'records.jsonl'}", soft_wrap=True)
        out_console.print(f"page     {page}", soft_wrap=True)
    unexpected = [r for r in records if r["outcome"] not in (r["expect"], "infeasible")]
    refused = [r for r in records if r["outcome"] == "infeasible" and r["expect"] != "infeasible"]
    return 1 if unexpected or len(refused) == len(records) else 0


def synth(source: str, out: Path, **options: Any) -> int:
    """`shardbench synth`."""
    from sharding import synth as writer

    model = ask.model_of(source, options).resolve()
    files = writer.write(model, out)
    size = sum(path.stat().st_size for path in files)
    console().print(
        f"{out}: {len(files)} files, {size / 1e6:.1f} MB, {model.dtype}"
        + (f", {model.quantization}" if model.quantization else "")
        + (f"; cut: {'; '.join(model.cuts)}" if model.cuts else ""),
        soft_wrap=True,
    )
    return 0


def report(runs: Sequence[str], out: Path, page: Path | None, as_json: bool) -> int:
    """`shardbench report`."""
    from harness import report as reports

    stores = [RunStore.find(out, text) for text in runs or ("latest",)]
    records = [record for store in stores for record in store.records()]
    written = reports.write_page(stores, page or stores[0].path / "report.html")
    if as_json:
        print_json({"runs": [store.run_id for store in stores], "records": records, "page": str(written)})
    else:
        out_console = console()
        reports.terminal(records, out_console)
        out_console.print(f"page     {written}", soft_wrap=True)
    return 0
