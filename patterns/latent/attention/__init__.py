"""Attention over a latent: its rule, encodings, calls of operators, and the cost of absorption."""
