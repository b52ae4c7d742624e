"""What a run found, for people: a table in the terminal and one page that needs nothing but itself.

    shardbench report latest

The page holds its style and its plots, fetches nothing, runs no script, and shows every case: those that were wrong,
crashed or infeasible stand beside the fast ones, with the reason.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness import environment as conditions
from harness import rows as view
from harness.errors import UsageError
from harness.runs import RunStore, write_atomic

# A plan can refuse a model for a dozen layers; a terminal is for the first of them.
REASONS_SHOWN = 3
TEMPLATES = Path(__file__).parent / "templates"
STYLES = {
    "ok": "green",
    "wrong": "bold red",
    "crashed": "red",
    "hung": "red",
    "infeasible": "dim",
    "unreachable": "yellow",
}


def terminal(records: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print one table a model, as wide as the console: what doesn't fit is shortened first and then left out by name."""
    for section in view.sections(records):
        console.print(Text(section.title, style="bold"), Text(", ".join(section.facts), style="dim"))
        if section.cuts:
            console.print(Text(f"cut to fit: {'; '.join(section.cuts)}", style="yellow"))
        _print_table(section, console)
        for line, outcome in _reasons(section):
            console.print(Text(line, style=STYLES[outcome]))
        for warning in section.warnings:
            console.print(Text(f"note: {warning}", style="yellow"))
        for remark in section.remarks:
            console.print(Text(f"note: {remark}", style="dim"))
        console.print()


@dataclass(frozen=True)
class _Column:
    """A column of the terminal table; the one of least importance is the first to go."""

    heading: str
    text: Callable[[view.Row], str]
    importance: int = 9
    left: bool = False


def _columns(section: view.Section, short: bool) -> list[_Column]:
    """Return a table's columns; the short form says ranks and batch in a line between rows and leaves out intervals."""
    wide = [
        _Column("ranks", lambda row: row.world, left=True),
        _Column("batch", lambda row: str(row.batch)),
    ]
    if len({row.context for row in section.rows}) > 1:
        wide.append(_Column("context", lambda row: str(row.context)))

    def collectives(row: view.Row) -> str:
        return row.collectives.replace("all_", "") if short else row.collectives

    return [
        _Column("strategy", lambda row: f" {row.strategy}" if short else row.strategy, left=True),
        *([] if short else wide),
        _Column("outcome", lambda row: row.outcome + (" (!)" if row.unexpected else ""), left=True),
        _Column("ms/step", lambda row: row.step if short else _with(row.step, row.step_interval)),
        _Column("ratio", lambda row: row.ratio if short else _with(row.ratio, row.ratio_interval), 8),
        _Column("tokens/s", lambda row: row.rate, 4),
        _Column("collectives" if short else "collectives/step", collectives, 7, left=True),
        _Column("bytes" if short else "bytes/step", lambda row: row.payload, 6),
        _Column("read" if short else "read/rank", lambda row: row.reads, 5),
        _Column("distance / tolerance", lambda row: row.distance, 3),
    ]


def _with(value: str, interval: str) -> str:
    return f"{value} ({interval})" if interval else value


def _print_table(section: view.Section, console: Console) -> None:
    gap = 2

    def width(columns: Sequence[_Column]) -> int:
        cells = [max([len(c.heading), *(cell_len(c.text(row)) for row in section.rows)]) for c in columns]
        return sum(cells) + gap * (len(cells) - 1)

    kept = _columns(section, short=False)
    short = width(kept) > console.width
    if short:
        gap, kept = 1, _columns(section, short=True)
    left_out = []
    while width(kept) > console.width and min(column.importance for column in kept) < 9:
        least = min(kept, key=lambda column: column.importance)
        kept.remove(least)
        left_out.append(least.heading)
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for column in kept:
        table.add_column(column.heading, justify="left" if column.left else "right", no_wrap=True)
    lines = []
    for _, rows in itertools.groupby(section.rows, key=lambda row: row.setting):
        members = list(rows)
        if short:
            # A line of its own, printed between the rows below: in a cell it would widen the first column.
            lines.append((len(table.rows), members[0].setting_words))
        for row in members:
            style = STYLES[row.outcome] if row.outcome != "ok" else ""
            table.add_row(*(Text(column.text(row), style=style) for column in kept))
    _print_between(table, lines, console)
    if left_out:
        console.print(
            Text(f"left out, {console.width} columns are too few: {', '.join(left_out)}", style="dim")
        )


def _print_between(table: Table, lines: Sequence[tuple[int, str]], console: Console) -> None:
    """Print `table` with a line before each of the rows that `lines` names."""
    rendered = console.render_lines(table, pad=False)
    before = dict(lines)
    for number, segments in enumerate(rendered):
        if number - 1 in before:
            console.print(Text(before[number - 1], style="dim"))
        console.print(
            *(Text(segment.text, style=segment.style or "") for segment in segments), sep="", soft_wrap=True
        )


def _reasons(section: view.Section) -> list[tuple[str, str]]:
    """Return (line, outcome) of the reasons, once for all the batches that they hold for, the first few of many."""
    batches: dict[tuple[str, str, str, tuple[str, ...]], list[int]] = {}
    for row in section.rows:
        if row.reasons:
            batches.setdefault((row.outcome, row.strategy, row.world, row.reasons), []).append(row.batch)
    lines = []
    for (outcome, strategy, world, reasons), found in batches.items():
        shown = ", ".join(map(str, dict.fromkeys(found)))
        lines.append((f"{outcome}: {strategy}, {view.ranks(world)}, batch {shown}: {reasons[0]}", outcome))
        lines += [(f"    {reason}", outcome) for reason in reasons[1:REASONS_SHOWN]]
        if len(reasons) > REASONS_SHOWN:
            lines.append((f"    and {len(reasons) - REASONS_SHOWN} more, which the page has", outcome))
    return lines


def write_page(runs: Sequence[RunStore], target: Path) -> Path:
    """Write one page about `runs` to `target`, whole or not at all, and return `target`.

    Raises:
        UsageError: no runs, or the page can't be written there.
    """
    if not runs:
        raise UsageError("a report needs at least one run: name one, or `latest`")
    page = render([_run_view(run, target.parent) for run in runs])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, page.encode())
    except OSError as error:
        raise UsageError(f"can't write the page {target}: {error.strerror or error}") from None
    return target


def render(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of runs as `_run_view` describes them."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    # Names of models, strategies and hosts come from files: everything is escaped, the style and the plots aside.
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup((TEMPLATES / "report.css").read_text())  # noqa: S704 - our own file
    return templates.get_template("report.html").render(runs=runs, style=style)


def _run_view(run: RunStore, beside: Path) -> dict[str, Any]:
    """Return what the template shows of one run; `beside` is the page's folder, to which links are relative."""
    records = run.records()
    sections = view.sections(records)
    facts = run.environment()
    strategies = [str(record.get("strategy") or "?") for record in records]
    return {
        "id": run.run_id,
        "started": _moment(facts.get("collected")),
        "tally": view.tally(records),
        "unexpected": [row.place for section in sections for row in section.rows if row.unexpected],
        "notes": [*conditions.notes(facts), *run.problems()],
        "sections": [_section_view(section, strategies, run, beside) for section in sections],
        "conditions": _conditions(facts),
        "request": json.dumps(run.sweep(), indent=2, ensure_ascii=False),
    }


def _section_view(
    section: view.Section, strategies: Sequence[str], run: RunStore, beside: Path
) -> dict[str, Any]:
    from markupsafe import Markup

    from harness import plots

    styles = plots.style_of(strategies)
    drawn = []
    for world, context in dict.fromkeys((row.world, row.context) for row in section.rows):
        rows = [
            row
            for row in section.rows
            if (row.world, row.context) == (world, context) and row.seconds is not None
        ]
        if len(rows) < 2:
            continue  # a single dot would be the table again, in a larger space
        where = f"{view.ranks(world)}, context {context}"
        reference = next((row.strategy for row in rows if row.ratio_interval == "reference"), "")
        legend = [
            {
                "strategy": name,
                "glyph": plots.GLYPHS[number % len(plots.GLYPHS)],
                "colour": number % len(plots.GLYPHS),
            }
            for name, number in styles.items()
            if any(row.strategy == name for row in rows)
        ]
        for caption, draw in (
            ("Milliseconds per decode step", plots.step_plot),
            (f"Time as a share of {reference}'s", plots.share_plot),
        ):
            svg = draw(rows, styles, f"{section.title}: {caption} by batch and strategy, {where}")
            if svg is not None:
                several = len({row.batch for row in rows}) > 1
                # matplotlib has escaped the labels in its drawing.
                drawing = Markup(svg)  # noqa: S704
                drawn.append(
                    {"svg": drawing, "caption": caption, "where": where, "legend": legend if several else []}
                )
    logs = {}
    for row in section.rows:
        if row.log and not Path(row.log).is_absolute() and (run.path / row.log).exists():
            logs[row.log] = Path(os.path.relpath(run.path / row.log, beside)).as_posix()
    return {"section": section, "plots": drawn, "logs": logs}


def _conditions(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) pairs of the environment record; what it does not say is left out, nothing is guessed."""
    machine, now = facts.get("machine") or {}, facts.get("state") or {}
    git, blas = facts.get("git") or {}, facts.get("blas") or {}
    commit = (
        f"{str(git['commit'])[:10]}{', with changes not committed' if git.get('dirty') else ''}"
        if git.get("commit")
        else None
    )
    hosts = list(dict.fromkeys(str(view["host"]) for view in facts.get("ranks") or [] if view.get("host")))
    pairs = [
        ("machine", _join(machine.get("name"), machine.get("os"), machine.get("arch"))),
        ("cluster", _cluster(facts.get("cluster"))),
        ("hosts of the ranks", ", ".join(hosts)),
        ("chip", _join(machine.get("chip"), f"{machine['cores']} cores" if machine.get("cores") else None)),
        ("memory", view.size(machine["memory_bytes"]) if machine.get("memory_bytes") else None),
        (
            "free at the start",
            view.size(now["memory_available_bytes"]) if now.get("memory_available_bytes") else None,
        ),
        ("load at the start", ", ".join(map(str, now.get("load") or []))),
        ("power", _dictionary(now.get("power"))),
        ("thermal", _dictionary(now.get("thermal"))),
        ("BLAS in the ranks", _join(blas.get("name"), blas.get("version"), blas.get("source"))),
        ("threads", _dictionary(facts.get("threads"))),
        ("MLX variables", _dictionary(facts.get("mlx_variables"))),
        ("versions", _dictionary({k: v for k, v in (facts.get("versions") or {}).items() if v}, " ")),
        ("commit", commit or git.get("note")),
    ]
    return [(name, str(value)) for name, value in pairs if value]


def _cluster(cluster: Any) -> str | None:
    return str(cluster.get("name")) if isinstance(cluster, Mapping) else cluster


def _join(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)


def _dictionary(values: Mapping[str, Any] | None, between: str = "=") -> str:
    return ", ".join(f"{name}{between}{value}" for name, value in (values or {}).items() if value is not None)


def _moment(text: Any) -> str:
    try:
        return f"{datetime.fromisoformat(str(text)):%Y-%m-%d %H:%M %Z}"
    except ValueError:
        return "at an unknown time"
