"""Operators of manifold-constrained hyper-connections (Xie et al., 2026): residual streams that are mixed by gates."""
