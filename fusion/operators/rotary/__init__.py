"""Operators of rotary position embedding."""
