"""Mixtures of experts: routers, which choose the experts of each token, and the experts themselves."""
