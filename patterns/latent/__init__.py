"""Attention over a latent: its prologs, its readers of keys and values, and its rules."""
