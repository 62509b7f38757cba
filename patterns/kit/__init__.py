"""Captures, views and scales that several domains use."""
