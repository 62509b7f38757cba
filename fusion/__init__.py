"""cann-fusion: a graph pass that rewrites plain PyTorch graphs to fused CANN operators."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fusion.errors import ExpectationWarning, FusionError
from fusion.frontend.backend import FusionBackend, fuse
from fusion.frontend.compilations import Compilation, log_as_asked, reports
from fusion.frontend.explain import explain
from fusion.frontend.exported import fuse_exported
from fusion.frontend.library import installed
from fusion.frontend.port import port
from fusion.frontend.regions import region
from fusion.language import (
    Captures,
    Example,
    Group,
    Library,
    Rule,
    alternative,
    attribute,
    bounded,
    calls,
    lookalike,
    lowering,
    pattern,
    reader,
    refused_on,
    require,
    rounding,
    scalar,
    tensor,
    variants,
    word,
)
from fusion.operators import Limit, Operator, Package, encodings
from fusion.operators.encodings import Encoding
from fusion.options import Options
from fusion.planning.target import Target
from fusion.report.report import Report
from fusion.runtime.prepared_weights import refresh

if TYPE_CHECKING:
    from fusion.frontend import integrations
    from fusion.frontend.passes import FusionPass

__all__ = [
    "Captures",
    "Compilation",
    "Encoding",
    "Example",
    "ExpectationWarning",
    "FusionBackend",
    "FusionError",
    "FusionPass",
    "Group",
    "Library",
    "Limit",
    "Operator",
    "Options",
    "Package",
    "Report",
    "Rule",
    "Target",
    "alternative",
    "attribute",
    "bounded",
    "calls",
    "encodings",
    "explain",
    "fuse",
    "fuse_exported",
    "installed",
    "integrations",
    "lookalike",
    "lowering",
    "pattern",
    "port",
    "reader",
    "refresh",
    "refused_on",
    "region",
    "reports",
    "require",
    "rounding",
    "scalar",
    "tensor",
    "variants",
    "word",
]


log_as_asked()


def __getattr__(name: str) -> Any:
    """Import `FusionPass` and `integrations` at their first use: they import Inductor, which takes seconds."""
    if name == "FusionPass":
        from fusion.frontend.passes import FusionPass

        return FusionPass
    if name == "integrations":
        return import_module("fusion.frontend.integrations")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
