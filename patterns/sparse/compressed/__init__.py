"""Attention over a window of keys and over compressed keys (DeepSeek-V4)."""
