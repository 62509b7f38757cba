"""Entry points: the backend of `torch.compile`, guests of other compilers, exported programs, `explain`, the CLI."""
