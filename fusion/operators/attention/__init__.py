"""Operators of softmax attention over keys and values, and the limits of their kernels."""
