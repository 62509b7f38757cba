"""Operators of packages outside torch_npu, and of generations that newer operators have replaced."""
