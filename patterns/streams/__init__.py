"""Residual streams of hyper-connections: gates, doubly stochastic matrices, collapses and updates of the streams."""
