"""Writes into caches and reads from their pages."""
