"""Lightning indexers: scores of keys, and the keys with the largest."""
