"""cann-fusion: plain PyTorch graphs in, fused CANN operators out."""

from fusion.pattern import (
    Example,
    Rule,
    attribute,
    lookalike,
    lowering,
    pattern,
    require,
    scalar,
    tensor,
)
from fusion.target import Target

__all__ = [
    "Example",
    "Rule",
    "Target",
    "attribute",
    "lookalike",
    "lowering",
    "pattern",
    "require",
    "scalar",
    "tensor",
]
