"""Sequences of different lengths: packed tokens, loops over sequences, and pages."""
