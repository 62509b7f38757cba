"""Operators of recurrences over tokens, as of linear attention."""
