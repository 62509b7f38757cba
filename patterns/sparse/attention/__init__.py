"""Attention over listed keys, in rows, pages or packed rows."""
