"""Composites: what is built from primitives and runs as one operator."""
