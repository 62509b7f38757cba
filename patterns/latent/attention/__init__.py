"""Attention over a latent: how it is encoded, absorbed or expanded, and put to its operators."""
