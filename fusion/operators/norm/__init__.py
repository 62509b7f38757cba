"""Operators of RMS and layer norms, with addition and quantisation."""
