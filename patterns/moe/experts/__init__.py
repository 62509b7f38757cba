"""Experts: dispatch of rows to experts, grouped matrix products, activations, and weighted sums."""
