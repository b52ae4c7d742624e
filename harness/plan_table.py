"""`plan` and `verify` for a person at a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.rows import size
from sharding.rows import Row
from sharding.source import Source

REASONS = 3
"""Reasons shown for one strategy and world size."""


def show(rows: Sequence[Row], source: Source, console: Console) -> None:
    """The plan's rows as a table, then the reasons of those that are refused or do not fit."""
    quantised = f", {source.quantization} weights" if source.quantization else ""
    console.print(
        f"{source.label}  {source.model_type}, {rows[0].parameters:,} parameters, {source.dtype}{quantised}",
        soft_wrap=True,
    )
    for line in (*(f"cut: {cut}" for cut in source.cuts), *(f"note: {note}" for note in source.notes)):
        console.print(line, style="dim", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("strategy")
    for name in (
        "ranks",
        "batch",
        "valid",
        "collectives",
        "bytes/step",
        "weights",
        "replicated",
        "read/step",
        "cache",
    ):
        table.add_column(name, justify="right" if name not in ("valid", "collectives") else "left")
    table.add_column("fits")
    for row in rows:
        if not row.valid:
            table.add_row(row.strategy, str(row.ranks), str(row.batch), "[red]no[/]")
            continue
        counts = ", ".join(f"{n} {kind}" for kind, n in (row.collectives_per_token or {}).items())
        table.add_row(
            row.strategy + (" (traced)" if row.traced else ""),
            str(row.ranks),
            str(row.batch),
            "[green]yes[/]",
            counts or "none",
            size(row.bytes_per_token),
            size(max(row.weight_bytes_per_rank)),
            size(max(row.replicated_weight_bytes_per_rank)),
            size(max(row.weight_bytes_read_per_token)),
            size(max(row.cache_bytes_per_rank)),
            {True: "yes", False: "[yellow]no[/]", None: "?"}[row.fits],
        )
    console.print(table)
    said: set[tuple[str, int, tuple[str, ...]]] = set()
    for row in rows:
        if (row.strategy, row.ranks, row.reasons) in said:
            continue
        said.add((row.strategy, row.ranks, row.reasons))
        for reason in row.reasons[:REASONS]:
            console.print(f"{row.strategy}, {row.ranks} ranks: {reason}", soft_wrap=True, markup=False)
        if len(row.reasons) > REASONS:
            console.print(f"    and {len(row.reasons) - REASONS} more, which --json has", soft_wrap=True)
    console.print("weights, replicated, read and cache are bytes of the fullest rank", style="dim")


def show_verdict(answer: Mapping[str, Any], console: Console) -> None:
    """A verdict in a few lines."""
    colour = {"ok": "green", "infeasible": "yellow"}.get(answer["outcome"], "red")
    console.print(
        f"[{colour}]{answer['outcome']}[/]  {answer['model']} {answer['strategy']}, {answer['ranks']} ranks "
        f"over {answer['backend']}, {answer['dtype']}",
        soft_wrap=True,
    )
    for reason in answer["reasons"]:
        console.print(f"  {reason}", soft_wrap=True, markup=False)
    if answer["relative_diff"] is not None:
        counted = answer["collectives_counted"] or "none"
        console.print(
            f"  logits off by {answer['relative_diff']:.2g} relative, {answer['tolerance']:.2g} is rounding; "
            f"KL {answer['kl']:.2g}; top-1 agreement {answer['top1_agreement']:.3f}; "
            f"ranks agree: {'yes' if answer['ranks_agree'] else 'no'}; collectives of a step: {counted}",
            soft_wrap=True,
            markup=False,
        )
    for note in answer["notes"]:
        console.print(f"  note: {note}", style="dim", soft_wrap=True, markup=False)
    if answer["log"]:
        console.print(f"  log: {answer['log']}", soft_wrap=True, markup=False)
