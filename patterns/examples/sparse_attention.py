"""Sparse attention."""

EXAMPLES = ()
REJECTS = ()
