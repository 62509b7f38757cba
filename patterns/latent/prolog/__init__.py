"""Prologs of latent attention: projections, norms, rotations and writes into caches."""
