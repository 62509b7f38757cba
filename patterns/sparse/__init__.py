"""Sparse attention over a list of keys."""
