"""Mixtures of experts: which expert a token goes to."""
