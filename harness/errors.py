"""The two exceptions that reach a user as one line and no traceback."""

from __future__ import annotations


class UsageError(Exception):
    """The request can't be understood or is refused; the message names the thing, the value and the remedy.

    The command line prints it as one line and exits with status 2.
    """


class Unreachable(Exception):
    """A host can't be reached, or the connection to it was lost; a case that ends so is `unreachable`."""
