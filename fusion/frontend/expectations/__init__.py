"""Expectations: the fusions that a model must have, as a file, and their comparison with a report."""
