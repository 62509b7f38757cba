"""Parts of the command `cann-fusion`: flags, models that are named on the command line, errors, and `expect`."""
