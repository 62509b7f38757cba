"""Targets, costs, and lowerings run on fake tensors: the cost of each way to run a match."""
