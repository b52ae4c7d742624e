"""Where text for people goes: a terminal as wide as it is, or a pipe that nothing is cut to fit."""

from __future__ import annotations

import sys

from rich.console import Console

PIPE_WIDTH = 200
"""Columns when stdout is no terminal: rich would cut tables at 80 there."""


def console(*, stderr: bool = False) -> Console:
    """A console for stdout (or stderr); colours and `NO_COLOR` are rich's business."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)
