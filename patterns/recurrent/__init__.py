"""Recurrences over tokens with a matrix as state: linear attention and delta rules."""
