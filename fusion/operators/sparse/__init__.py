"""Operators that select keys, and attention over the selected keys."""
