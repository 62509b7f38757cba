"""FusionPass: the same pass as a guest in another compiler's pipeline."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.fx as fx

from fusion import operators
from fusion.errors import StageError
from fusion.failures import warn
from fusion.language import Library, Rule
from fusion.language.code import loaded, names_of
from fusion.library import library_for
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.routes import vendor
from fusion.target import Target


class FusionPass:
    """A callable over a functionalised aten graph, which it rewrites in place.

    Works as torchair's and npugraph_ex's `post_grad_custom_pre_pass` (which pass further arguments) and as Inductor's
    `CustomGraphPass`: nodes must carry fake tensors in `meta["val"]`.

    Attributes:
        options: how graphs are fused.
        library: the rules and readers in use.
    """

    def __init__(
        self, options: Options | Mapping[str, Any] | None = None, rules: Library | Iterable[Rule] | None = None
    ) -> None:
        self.options = Options.of(options)
        self.library = library_for(self.options, rules)

    def __call__(self, graph: fx.GraphModule | fx.Graph, *context: Any) -> None:
        """Fuse in place; a graph without any match stays node for node as it is.

        Where the pass fails, the graph is left as it came, with a warning.

        Raises:
            FusionError: the graph carries no shapes.
        """
        source = graph.graph if isinstance(graph, fx.GraphModule) else graph
        try:
            outcome = fuse_graph(source, self.library, self.options, told=False)
        except StageError as error:
            warn([error.failure])
            return
        warn(outcome.failures)
        if not outcome.chosen:
            return
        vendor.mend_loaded()
        if isinstance(graph, fx.GraphModule):
            graph.recompile()

    def uuid(self) -> str:
        """A key for caches of compiled graphs: all code that decides, target, options and versions."""
        content = [
            names_of(self.library),
            loaded(self.library),
            Target.resolve(self.options.target).name,
            repr(self.options.key()),
            str(operators.ensure()),
            torch.__version__,
        ]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()
