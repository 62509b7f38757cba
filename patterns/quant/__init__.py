"""Quantisation: int8 numbers with their scales, and the layers that multiply them."""
