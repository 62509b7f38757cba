"""Log-sum-exps of attention, and merges of attention over parts of the keys."""
