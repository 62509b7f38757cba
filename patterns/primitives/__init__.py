"""Primitives: one operator's worth of mathematics each."""
