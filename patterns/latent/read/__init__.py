"""Readers of latents: keys and values projected from one tensor, absorbed queries and results."""
