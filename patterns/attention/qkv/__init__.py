"""Projections of queries, keys and values with norms, rotations and cache writes, in one operator."""
