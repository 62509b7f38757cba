"""Lists of keys: entries, rows gathered by them, and buffers that keep such rows."""
