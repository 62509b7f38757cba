"""Records of what was done in each graph: rewrites, refusals, failures; and the writers that print them."""
