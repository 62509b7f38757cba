"""Experts: rows by expert, products of groups, activations, and weighted sums."""
