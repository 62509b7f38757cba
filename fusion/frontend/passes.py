"""FusionPass: the pass as a guest in another compiler's pipeline."""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.fx as fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fusion import operators
from fusion._torch.inductor import calls_at_run_time, hosts_pass
from fusion._torch.naming import input_name
from fusion._torch.tensors import attribute_of
from fusion._torch.tracing import copied, dynamo_inputs, dynamo_position, refill
from fusion.errors import FusionError, StageError
from fusion.facts import Facts
from fusion.frontend.backend import FusionBackend
from fusion.frontend.compilations import MOST, Captured, add, described, report_of, unfused
from fusion.frontend.library import completed, library_for
from fusion.graph.aliasing import name_results, outputs
from fusion.graph.parameter_only import marks, parameter_inputs
from fusion.language import Library, Reader, Rule
from fusion.language.cache_keys import keys_of, loaded
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.planning.target import Target
from fusion.report.failures import stage, warn
from fusion.report.outcome import GraphReport, Outcome
from fusion.report.report import Report
from fusion.routes import vendor
from fusion.routes.inductor import copy_before_writes, copy_results, guest_table
from fusion.routes.inductor_guest import decompose_added, is_on_npu
from fusion.runtime.prepared_calls import call_prepared
from fusion.stages.lower import is_guest_idle


class FusionPass(CustomGraphPass):
    """Graph pass that rewrites a functional aten graph in place; nodes have fake tensors in `meta["val"]`.

    Works as every custom pass of Inductor after tracing (`post_grad_custom_pre_pass`, `joint_custom_post_pass`, ...),
    whose cache of graphs stays in use, and as torchair's and npugraph_ex's `post_grad_custom_pre_pass` (which pass
    further arguments). In a graph of Inductor on a CPU or GPU, fused operators are replaced by their decompositions, so
    that Inductor generates code for them. Graphs from the backend of this package, which are fused already, are left
    as they are. Passes pickle, without their reports, and copies of one have equal keys.

    Attributes:
        options: the options.
        rules: the given rules to choose from; None for the installed ones.
        library: the rules and readers in use.
    """

    def __init__(
        self, options: Options | Mapping[str, Any] | None = None, rules: Library | Iterable[Rule | Reader] | None = None
    ) -> None:
        self.options = Options.of(options)
        self.rules = None if rules is None else completed(rules)
        self.library = library_for(self.options, self.rules)
        self._captured: deque[Captured] = deque(maxlen=MOST)

    @property
    def report(self) -> Report:
        """The report over the graphs that this pass has fused in this process, made by a search of each when it is
        first read.
        """
        return replace(report_of(self.options.target, list(self._captured)), notes=_without_effect(self.options))

    def __deepcopy__(self, memo: dict[int, Any]) -> FusionPass:
        """Return the pass itself, as hosts copy their configuration, and its report is to have what a copy fused."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the pass from its arguments: the installed library is that of the process that unpickles."""
        return type(self), (self.options, self.rules)

    def __call__(self, graph: fx.GraphModule | fx.Graph, *context: Any) -> None:
        """Fuse in place; a graph without any match is not changed.

        Where the pass fails, the graph is not changed, with a warning.

        Raises:
            FusionError: `graph` is no graph, or has no shapes.
        """
        given: Any = graph
        if not isinstance(given, fx.GraphModule | fx.Graph):
            raise FusionError(
                f"running FusionPass: a {type(given).__name__} is no graph of torch.fx; hand the pass to a compiler "
                "(docs/guests.md), or compile a model by torch.compile(model, backend='cann_fusion')"
            )
        if is_guest_idle():
            return
        source = graph.graph if isinstance(graph, fx.GraphModule) else graph
        try:
            outcome = self._fuse(source)
        except StageError as error:
            add(unfused("FusionPass", self.options.target, source, str(error)))
            warn([error.failure])
            return
        warn(outcome.failures)
        if not outcome.chosen:
            return
        vendor.mend_loaded()
        if isinstance(graph, fx.GraphModule):
            graph.recompile()

    def _fuse(self, source: fx.Graph) -> Outcome:
        """Rewrite `source` in place, in calls that its host lowers.

        Inductor itself decides about in-place writes, except for operators of an NPU, which it launches one by one.
        Results keep their names, to which the signature of an exported program refers.

        Raises:
            FusionError: the graph has no shapes.
            StageError: a stage failed; the graph is unchanged.
        """
        started = perf_counter()
        original, options, inductor = copied(source), self.options, hosts_pass()
        on_npu = inductor and is_on_npu(source)
        if on_npu and not options.plan_lower:
            options = replace(options, plan_lower="inductor")
        with stage("capture"):
            paths = self._parameters(source) if inductor and not on_npu else {}
        facts = Facts(frozenset(paths))
        in_place = on_npu or not inductor
        outcome = fuse_graph(
            source, self.library, options, facts, original=original, with_refusals=False, in_place=in_place
        )
        seconds, backend = perf_counter() - started, FusionBackend(options, self.rules)
        captured = Captured(partial(_reported, original, _attributes(source), backend, facts))
        listed = described("FusionPass", options.target, original, source, outcome, captured, seconds)
        if inductor and outcome.chosen:
            try:
                with stage("lower"):
                    prepared = call_prepared(source, outcome.prepared, paths) if outcome.prepared else []
                    decompose_added(source, guest_table())
                    copy_before_writes(source, prepared)
                    copy_results(source)
            except StageError:
                refill(source, original)
                raise
        name_results(source, [node.name for node in outputs(original)])
        self._captured.append(captured)
        add(listed, outcome)
        return outcome

    def _parameters(self, source: fx.Graph) -> dict[str, str]:
        """Name the inputs of a graph of Inductor that hold Parameters, by whose identity a call inside the graph can
        look up prepared tensors; with their paths in the model.
        """
        given = dynamo_inputs(source) if calls_at_run_time() else []
        positions = {node.name: dynamo_position(node) for node in source.find_nodes(op="placeholder")}
        named = parameter_inputs(source, marks([value for _, value in given]))
        return {name: input_name(given[at][0]) for name, at in positions.items() if name in named and at is not None}

    def uuid(self) -> str | None:
        """Return a key of compiled graphs: a digest of the code of engine and library, target, options and versions.

        Returns:
            The key; None, for which Inductor caches no graph, where a rule reads state of this process alone.
        """
        keys = keys_of(self.library)
        if keys is None:
            return None
        content = [
            keys,
            loaded(self.library),
            Target.resolve(self.options.target).name,
            repr(self.options.key()),
            str(operators.ensure()),
            torch.__version__,
            str(is_guest_idle()),
        ]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()


def _without_effect(options: Options) -> tuple[str, ...]:
    """Return a remark for each of `options` that a guest ignores."""
    given = [name for name in ("assume", "verify", "expect") if getattr(options, name)]
    why = "FusionPass is a guest of another compiler, and only the backend cann_fusion checks calls and expectations"
    return tuple(f"option {name} has no effect: {why}" for name in given)


def _attributes(source: fx.Graph) -> dict[str, Any]:
    """Return what `source` refers to in its module, by name; tensors weakly, as they may be weights."""
    named = [node for node in source.nodes if node.op in ("get_attr", "call_module")]
    values = {str(node.target): attribute_of(node) for node in named}
    return {name: weakref.ref(each) if isinstance(each, torch.Tensor) else each for name, each in values.items()}


def _reported(
    original: fx.Graph, attributes: Mapping[str, Any], backend: FusionBackend, facts: Facts
) -> GraphReport | None:
    """Fuse a copy of `original`, of whose inputs `facts` are known, by `backend` and report; None where a tensor among
    its `attributes` is freed.
    """
    root = {name: each() if isinstance(each, weakref.ref) else each for name, each in attributes.items()}
    if any(each is None for each in root.values()):
        return None
    gm = fx.GraphModule(root, copied(original))
    quiet = replace(backend, options=replace(backend.options, dump_dir="", progress=False))
    try:
        return quiet.fuse(gm, facts, in_place=False)
    except StageError as error:
        return quiet.failed(gm, error)
