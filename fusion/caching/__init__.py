"""Caches of plans and of rewritten graphs, in memory and on disk, by digest."""
