"""Targets, costs, and lowerings run on fake tensors: how much each way to run a match would cost."""
