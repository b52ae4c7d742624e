"""The two ways in which this package says no."""

from __future__ import annotations


class BadRequest(ValueError):
    """The request can't be understood: the message names the thing, its value and the remedy in one line."""


class Rejected(ValueError):
    """The request is understood and the split is not legal.

    Args:
        reasons: One line each, in words and numbers.
    """

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons
