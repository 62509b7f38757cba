"""Quantised numbers and products of them."""
