"""Reasons for attention, and for recurrences like it, that no operator computes."""
