"""Softmax attention read from contractions: scores, weights, values, and the frame of heads and queries."""
