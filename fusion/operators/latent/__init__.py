"""Operators of multi-head latent attention (MLA)."""
