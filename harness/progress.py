"""A progress bar for a run, on stderr; plain lines when that is no terminal, nothing when asked to be quiet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Event = dict[str, Any]


def describe(event: Event) -> str | None:
    """One short phrase for what the ranks are doing, or None for events that change nothing a reader sees."""
    kind = event.get("event")
    if kind == "reference":
        return f"{event['model']}: one rank, the whole model"
    if kind == "group":
        return f"{event['model']}: {event['ranks']} ranks over {event['backend']}"
    if kind == "begin" and event.get("phase") in ("load", "check", "time") and event.get("rank") == 0:
        names = ", ".join(event["strategies"])
        shape = event.get("shape")
        at = f" at batch {shape[0]}, context {shape[1]}" if shape else ""
        return f"{event['phase']} {names}{at}"
    if kind == "progress" and "what" in event:
        return str(event["what"])
    return None


@contextmanager
def display(total: int, title: str, *, quiet: bool = False) -> Iterator[Callable[[Event], None]]:
    """Show `total` cases being settled; yields the function that takes events.

    A `record` event moves the bar on by one case.
    """
    if quiet:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        yield _lines(total)
        return
    columns = (
        TextColumn("{task.fields[title]}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", style="dim"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total, title=title)

        def take(event: Event) -> None:
            if event.get("event") == "record":
                bar.advance(task)
            elif (text := describe(event)) is not None:
                bar.update(task, description=text)

        yield take


def _lines(total: int) -> Callable[[Event], None]:
    done = 0

    def take(event: Event) -> None:
        nonlocal done
        if event.get("event") == "record":
            done += 1
        elif (text := describe(event)) is not None:
            sys.stderr.write(f"[{done}/{total}] {text}\n")

    return take
