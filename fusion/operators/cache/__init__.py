"""Operators that write into caches and gather from their pages."""
