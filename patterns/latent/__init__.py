"""Attention over a latent that all heads share, and how it is put to the operators."""
