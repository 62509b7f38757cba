"""Softmax attention, and the parts from which readers of other kinds of attention are made.

A kind of attention with other scores or operands starts from the `attention_core` readings of a graph
(`cores_by_value`), changes what differs in a `Core`, and hands it to `read_attention`, which reads rows, masks and
biases.
"""

from patterns.attention.calls import viewed
from patterns.attention.core.core import ATTENTION_CORE, Core, cores_of
from patterns.attention.core.operands import Operands, in_floats
from patterns.attention.core.read import annotated, cores_by_value, read_attention
from patterns.attention.core.scores import Scores, scores_of
from patterns.attention.masks.assumed import Assumed
from patterns.attention.masks.visibility import Dense, Structured, Unmasked, Visibility
from patterns.attention.words import ATTENTION_MASK, SOFTMAX_ATTENTION

__all__ = [
    "ATTENTION_CORE",
    "ATTENTION_MASK",
    "SOFTMAX_ATTENTION",
    "Assumed",
    "Core",
    "Dense",
    "Operands",
    "Scores",
    "Structured",
    "Unmasked",
    "Visibility",
    "annotated",
    "cores_by_value",
    "cores_of",
    "in_floats",
    "read_attention",
    "scores_of",
    "viewed",
]
