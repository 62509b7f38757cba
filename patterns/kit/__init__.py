"""Helpers that several domains share: int8 scales, order of rotated pairs, encodings of results."""
