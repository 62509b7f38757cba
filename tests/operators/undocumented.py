"""What no document says."""

from __future__ import annotations


class Undocumented(Exception):
    """A call whose result no document gives: a reference has nothing to compare with."""
