"""Operators of products with weights and of gated activations."""
