"""Attention over a latent: what stands before it, its keys and values, and the rows that it keeps."""
