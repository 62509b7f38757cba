"""cann-fusion: plain PyTorch graphs in, fused CANN operators out."""

from fusion.backend import fuse
from fusion.errors import FusionError
from fusion.explain import explain
from fusion.language import (
    Example,
    Group,
    Library,
    Rule,
    alternative,
    attribute,
    calls,
    lookalike,
    lowering,
    pattern,
    reader,
    refused_on,
    require,
    scalar,
    tensor,
    variants,
    word,
)
from fusion.options import Options
from fusion.passes import FusionPass
from fusion.prepared import refresh
from fusion.report import Report
from fusion.target import Target

__all__ = [
    "Example",
    "FusionError",
    "FusionPass",
    "Group",
    "Library",
    "Options",
    "Report",
    "Rule",
    "Target",
    "alternative",
    "attribute",
    "calls",
    "explain",
    "fuse",
    "lookalike",
    "lowering",
    "pattern",
    "reader",
    "refresh",
    "refused_on",
    "require",
    "scalar",
    "tensor",
    "variants",
    "word",
]
