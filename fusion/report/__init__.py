"""Records of rewrites, refusals and failures in each graph, and their text and JSON."""
