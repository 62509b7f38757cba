"""Helpers that several domains share: scales of int8, linear layers, lanes of concatenations, packed segments."""
