"""What the pass costs: scripts that print ratios."""
