"""Operators that quantise, and that multiply int8 tensors."""
