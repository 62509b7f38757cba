"""Operators that route tokens to experts, and multiply by the weights of experts."""
