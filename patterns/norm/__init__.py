"""Norms, and what stands beside them."""
