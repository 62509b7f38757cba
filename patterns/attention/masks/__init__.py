"""Masks and biases of attention: read as formulas, described by captures, and put to operators."""
