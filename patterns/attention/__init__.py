"""Softmax attention over keys and values: one rule, its facets, and how they are put to the operators."""
