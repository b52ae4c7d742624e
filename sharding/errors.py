"""The two ways in which this package says no."""

from __future__ import annotations


class BadRequest(ValueError):
    """The request can't be understood: the message names the thing, its value and the remedy in one line."""

    def __init__(self, message: str) -> None:
        # Messages quote other libraries' exceptions, some of which have many lines.
        super().__init__(" ".join(line.strip() for line in message.splitlines()))


class Rejected(ValueError):
    """The request is understood and the split is not legal.

    Args:
        reasons: One line each, in words and numbers.
    """

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons
