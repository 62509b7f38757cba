"""Masks and biases of attention: read as formulas, and in words that operators take."""
