"""Norms over the last dim, with a residual add before and a quantisation or cast behind."""
