"""The two ways in which volunteering ends other than by being told to stop."""

from __future__ import annotations


class OptionError(ValueError):
    """An option cannot be used; the text says what was got and what was expected."""


class VolunteerEnded(Exception):
    """The server said that trying again is of no use, or nothing here multiplies right; the text says why."""
