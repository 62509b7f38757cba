"""Prologs of latent attention."""

EXAMPLES = ()
ROW_EXAMPLES = ()
REJECTS = ()
