"""The laws that every rule must keep, as functions: `check(rule, example, dtype, level)` raises where one is broken.

graph = capture(function, args).graph          the functional aten graph that a backend would see
widen(graph)                                   the same in float64, so that only the algebra is left to compare
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import combinations
from typing import Any, Literal, get_args

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.immutable_collections import immutable_dict

from fusion._torch.operators import OpOverload, core_table, schema_of
from fusion._torch.tensors import shares_memory, tree_leaves, tree_map, tree_map_only
from fusion._torch.tracing import Boxed, aot_inference, boxed, preserve_composites
from fusion.facts import Facts
from fusion.known import returned, strides_of
from fusion.language import Example, Library, Rule
from fusion.library import examples, installed
from fusion.operators import operator_of
from fusion.options import Options
from fusion.outcome import live_calls
from fusion.pipeline import Outcome, fuse_graph
from fusion.verification import relative_error
from fusion.weights import marks, parameter_inputs

Level = Literal["composite", "decomposed", "core"]
LEVELS: tuple[Level, ...] = get_args(Level)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDENED = 1e-12
"""Relative error up to which two float64 graphs are the same algebra."""

BYTES = 64
"""How far from it no whole number is that was rounded to the one in float64, or to one beside that."""


@dataclass(frozen=True)
class Captured:
    """A functional aten graph and the tensors (and sizes) that it takes, parameters included.

    `assumed` names inputs of the graph of which a user says what they are, as `Facts.assumed`.
    """

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    strides: tuple[tuple[Any, ...] | None, ...] = ()
    assumed: Mapping[str, str] = immutable_dict()

    @property
    def facts(self) -> Facts:
        """Which of the inputs are Parameters, and how the results lie when the function runs without a compiler."""
        parameters = parameter_inputs(self.graph.graph, marks(self.inputs))
        return Facts(parameters, assumed=self.assumed, strides=self.strides, extensible=True)


class _Stop(Exception):  # noqa: N818 - carries the result out of a compiled function
    def __init__(self, captured: Captured) -> None:
        self.captured = captured


def capture(
    function: Callable[..., Any],
    args: Sequence[Any],
    level: Level = "composite",
    *,
    dynamic: bool | None = False,
    **kwargs: Any,
) -> Captured:
    """Trace the call `function(*args, **kwargs)` for inference; nothing is run and no input is written to.

    `level` says how far operators are decomposed: "composite" as the backend captures, "decomposed" as torch does it
    without a table, "core" to the core aten operators. Resets Dynamo, so that captures do not depend on each other.

    Raises:
        torch._dynamo.exc.Unsupported: the call is not one graph.
    """
    table = core_table() if level == "core" else {}

    def compile_graph(results: Sequence[Any], gm: fx.GraphModule, _: Sequence[Any]) -> Boxed:
        strides = strides_of(results, gm.graph)

        def stop(*inputs: Any) -> Any:
            raise _Stop(Captured(gm, inputs, strides))

        return boxed(stop)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with preserve_composites() if level == "composite" else nullcontext():
            return aot_inference(gm, example_inputs, partial(compile_graph, returned(gm)), table)

    torch.compiler.reset()
    try:
        with torch.no_grad():
            torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args, **kwargs)
    except _Stop as stop:
        return stop.captured
    raise AssertionError(f"capturing {function}: it computes nothing on tensors")


@lru_cache(maxsize=512)
def captured(example: Example, dtype: torch.dtype, level: Level = "composite") -> Captured:
    """What `capture` gives for an example, once: whoever changes a graph changes a copy.

    Sizes that the inputs mark as dynamic for Dynamo are symbolic.
    """
    return capture(example.function, example.inputs(dtype), level, dynamic=None)


def widen(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of `gm` in which every floating dtype is float64 and every complex one complex128, for such inputs.

    A default epsilon stays that of the narrow dtype, and bytes stay those of narrow numbers. Fused operators run by
    their fallbacks, which compute float64 in float64.
    """
    wide = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in wide.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(wide, node.target, None), Tensor):
            setattr(wide, node.target, widened(getattr(wide, node.target)))
        if node.target is torch.ops.aten.view.dtype:
            source = node.all_input_nodes[0].meta["val"].dtype
            node.target, node.args = _as_bits, (*node.args, source)
        elif _multiplies_groups(node):
            node.target = _by_groups
        elif node.op == "call_function":
            node.args, node.kwargs = tree_map_only(torch.dtype, _wide, (_pinned(node), dict(node.kwargs)))
            _make_wide(node)
    wide.recompile()
    return wide


def widened(value: Any) -> Any:
    """`value` with its floating-point tensors in float64; every tensor is copied."""
    return tree_map_only(Tensor, lambda each: each.detach().to(_wide(each.dtype), copy=True), value)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


def _as_bits(x: Tensor, dtype: torch.dtype, source: torch.dtype) -> Tensor:
    """The memory that `x` has in its narrow dtype `source`, read as another."""
    return widened(x.to(source).view(dtype))


def _multiplies_groups(node: fx.Node) -> bool:
    """Whether rows are multiplied by a matrix for each group, which torch does in float32 at most."""
    grouped = node.target is torch.ops.aten._grouped_mm.default
    return grouped and tuple(each.meta["val"].dim() for each in node.all_input_nodes[:2]) == (2, 3)


def _by_groups(x: Tensor, matrices: Tensor, offs: Tensor, bias: None = None, out_dtype: Any = None) -> Tensor:
    """The same; rows of no group are 0."""
    y = x.new_zeros(x.shape[0], matrices.shape[2])
    for start, end, matrix in zip((0, *offs.tolist()), offs.tolist(), matrices, strict=False):
        y[start:end] = x[start:end] @ matrix
    return y


def _pinned(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments, with what would follow the dtype made explicit."""
    name = schema_of(node.target).name if isinstance(node.target, OpOverload) else ""
    if name in ("aten::rms_norm", "aten::_fused_rms_norm"):
        given: tuple[Any, ...] = (*node.args, None, None)
        x, shape, weight, eps = given[:4]
        narrow = torch.finfo(torch.promote_types(x.meta["val"].dtype, torch.float32)).eps
        return x, shape, weight, narrow if eps is None else eps
    if name in ("aten::_softmax", "aten::_log_softmax"):
        return (*node.args[:2], False)
    return node.args


def _make_wide(node: fx.Node) -> None:
    """Give a factory that relies on the default dtype the wide one."""
    val = node.meta.get("val")
    if isinstance(node.target, OpOverload) and isinstance(val, Tensor) and not node.all_input_nodes:
        names = [argument.name for argument in schema_of(node.target).arguments]
        if "dtype" in names[len(node.args) :] and _wide(val.dtype) != val.dtype:
            node.kwargs = {**node.kwargs, "dtype": _wide(val.dtype)}


# trials ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A captured function before and after the pass.

    Attributes:
        library: what took part: the rule under test first, then those that it is built from or offered beside.
        captured: the graph as it came, and its inputs.
        fused: a copy of the graph after the pass.
        outcome: what the pass did.
    """

    library: Library
    captured: Captured
    fused: fx.GraphModule
    outcome: Outcome

    @property
    def rule(self) -> Rule:
        """The rule under test."""
        return self.library.rules[0]

    def inputs(self, wide: bool = False) -> list[Any]:
        """What the fused graph takes: copies of the captured inputs, and what is prepared from them."""
        copies = tree_map(widened, list(self.captured.inputs)) if wide else _copies(self.captured.inputs)
        names = [node.name for node in self.captured.graph.graph.find_nodes(op="placeholder")]
        named = dict(zip(names, copies, strict=True))
        for each in self.outcome.prepared:
            module = widen(each.module) if wide else each.module
            copies.append(module(*(named[name] for name in each.sources)))
        return copies


def trial(
    rule: Rule,
    example: Example,
    dtype: torch.dtype,
    level: Level = "composite",
    options: Options = Options(target="host", lower="eager"),
    library: Library | None = None,
) -> Trial:
    """Capture `example` and fuse it by `rule` and what it needs in `library` (by default the installed one).

    That is what its patterns are built from, and the rules beside which it is offered. An opt-in rule is on.
    """
    known = installed() if library is None else library
    needed = replace(known, rules=_closure(rule, known.rules))
    return trial_of(captured(example, dtype, level), _with(rule, options), needed)


def _with(rule: Rule, options: Options) -> Options:
    """The options with a rule switched on."""
    return replace(options, opt_in=options.opt_in | {rule.name}) if rule.opt_in else options


def trial_of(
    source: Captured, options: Options = Options(target="host", lower="eager"), library: Library | None = None
) -> Trial:
    """Fuse a captured function by all of `library` (by default the installed one)."""
    known = installed() if library is None else library
    fused = fx.GraphModule(source.graph, copy.deepcopy(source.graph.graph))
    outcome = fuse_graph(fused.graph, known, options, source.facts)
    fused.recompile()
    return Trial(known, source, fused, outcome)


def _closure(rule: Rule, library: Iterable[Rule]) -> tuple[Rule, ...]:
    by_name = {each.name: each for each in library}
    found = {rule.name: rule}
    waiting = [rule]
    while waiting:
        each = waiting.pop()
        for name in sorted(each.uses() | each.beside()):
            if name in by_name and name not in found:
                found[name] = by_name[name]
                waiting.append(by_name[name])
    return tuple(found.values())


# laws --------------------------------------------------------------------------------------------------------------


def recognises(t: Trial) -> None:
    """The rule is applied to its own example."""
    applied = [each.match.rule.name for each in t.outcome.chosen]
    refusals = "\n".join(str(each) for each in t.outcome.refusals)
    assert t.rule.name in applied, f"{t.rule.name} does not recognise its example; fused {applied}\n{refusals}"


def means_what_it_says(t: Trial) -> None:
    """The same algebra in float64, and in the dtype an error of at most 1.5 times that of the original, plus one ulp.

    Results and every input that is written to are compared.
    """
    count = len(t.captured.inputs)
    truth = _run(widen(t.captured.graph), t.inputs(wide=True)[:count], count)
    algebra = _run(widen(t.fused), t.inputs(wide=True), count)
    before = _run(t.captured.graph, t.inputs()[:count], count)
    after = _run(t.fused, t.inputs(), count)
    for number, (exact, same, old, new) in enumerate(zip(truth, algebra, before, after, strict=True)):
        if not isinstance(exact, Tensor):
            assert new == old, f"result {number} is {new}, not {old}"
            continue
        assert (new.shape, new.dtype) == (old.shape, old.dtype), f"result {number}: {new.dtype}{list(new.shape)}"
        if exact.dtype == torch.int8:
            _holds_the_same_whole_numbers(number, exact, same, old, new)
            continue
        if not exact.is_floating_point():
            assert torch.equal(new, old), f"result {number} differs"
            continue
        wrong = relative_error(same, exact)
        assert wrong <= WIDENED, f"result {number}: the algebra is wrong, float64 differs by {wrong:.3g}"
        if exact.isfinite().all() and not old.double().isfinite().all():
            continue  # the original overflows in this dtype: there is no rounding to compare
        limit = 1.5 * relative_error(old, exact) + torch.finfo(old.dtype).eps
        error = relative_error(new, exact)
        assert error <= limit, f"result {number}: rms error {error:.3g} where {limit:.3g} is allowed"


def _holds_the_same_whole_numbers(number: int, exact: Tensor, same: Tensor, old: Tensor, new: Tensor) -> None:
    """Numbers that stand for others: the same in float64, else at most the one beside, and not more often.

    Bytes of wider numbers, which the original itself has far from those in float64, are only counted.
    """
    assert torch.equal(same, exact), f"result {number}: the algebra is wrong, float64 differs"
    off, before = ((each.int() - exact.int()).abs() for each in (new, old))
    near = off.max() <= max(1, int(before.max())) or before.max() > BYTES
    assert near, f"result {number} is {off.max()} beside the number in float64"
    limit = 1.5 * before.bool().sum() + 1 + exact.numel() // 100
    assert off.bool().sum() <= limit, f"result {number}: {off.bool().sum()} numbers differ, {limit:g} may"


def emits_valid_calls(t: Trial) -> None:
    """Every new call fits its operator's schema, and really gives the shape and dtype that its node says."""
    for node in t.fused.graph.nodes:
        if "fusion" in node.meta and isinstance(node.target, OpOverload):
            operator = operator_of(node.target)
            if operator is not None:
                operator.bind(node.args, node.kwargs)
    t.fused.graph.lint()
    _Checked(t.fused).run(*t.inputs())


def idempotent(t: Trial) -> None:
    """The pass finds nothing more to do in its own result."""
    again = copy.deepcopy(t.fused.graph)
    options = _with(t.rule, Options(target="host", lower="eager"))
    outcome = fuse_graph(again, t.library, options, t.captured.facts)
    names = [each.match.rule.name for each in outcome.chosen]
    assert not names, f"a second pass fused {names}"
    assert _text(again) == _text(t.fused.graph), "a second pass changed the graph"


def saves_what_it_claims(t: Trial) -> None:
    """As many launches less as the candidates said; more only where several share what they build, or what the model
    computes for them from Parameters is prepared.
    """
    graphs = t.captured.graph.graph, t.fused.graph
    calls, left = (live_calls(graph) for graph in graphs)
    before, after = (sum(each.launches for each in counted.values()) for counted in (calls, left))
    copies = sum(each.launches for node, each in calls.items() if node.name in t.outcome.in_place)
    claimed = sum(each.launches for each in t.outcome.chosen) + copies
    may_save_more = len(t.outcome.chosen) != 1 or bool(t.outcome.prepared)
    saved = before - after == claimed or (before - after > claimed and may_save_more)
    assert saved, f"{before} launches became {after}, {claimed} fewer were claimed"


def refuses(t: Trial, text: str, instead: str = "") -> None:
    """The rule is not applied, and says why with `text` in its reason and a place in the model's code.

    With `instead` it is applied, and in no other form than those with that name.
    """
    applied = [each.match.form for each in t.outcome.chosen if each.match.rule.name == t.rule.name]
    wrong = [form for form in applied if not instead or instead not in form]
    assert not wrong, f"{t.rule.name} was applied as {wrong} although it must be refused with {text!r}"
    assert applied or not instead, f"{t.rule.name} was not applied as {instead!r} instead"
    speaking = {t.rule.name, *t.rule.uses()}
    given = [each for each in t.outcome.refusals if each.rule in speaking and text in each.reason]
    others = "\n".join(str(each) for each in t.outcome.refusals)
    assert given, f"{t.rule.name} was not refused with {text!r} but with:\n{others}"
    assert all(each.where for each in given), "the refusal does not say where"


def leaves_the_rest_alone(t: Trial) -> None:
    """Where no rule applies, the graph keeps its nodes: the same objects in the same order with the same arguments."""
    graph = copy.deepcopy(t.captured.graph.graph)
    before, text = list(graph.nodes), _text(graph)
    options = _with(t.rule, Options(target="host", lower="eager", fuel=0))
    outcome = fuse_graph(graph, t.library, options, t.captured.facts)
    after = list(graph.nodes)
    assert not outcome.chosen
    assert list(map(id, before)) == list(map(id, after)), "nodes were added, dropped or moved"
    assert _text(graph) == text, "the arguments of a node were changed"


def check(rule: Rule, example: Example, dtype: torch.dtype, level: Level = "composite") -> None:
    """Every law for one example, or for one reject (an example with a refusal).

    Raises:
        AssertionError: a law is broken; the message says which and how.
    """
    t = trial(rule, example, dtype, level)
    if example.refusal:
        refused = partial(refuses, text=example.refusal, instead=example.instead)
        laws: Sequence[Callable[[Trial], None]] = (refused, leaves_the_rest_alone)
        laws = (*laws, means_what_it_says) if example.instead else laws
    else:
        laws = (
            recognises, means_what_it_says, emits_valid_calls, idempotent, saves_what_it_claims, leaves_the_rest_alone,
        )  # fmt: skip
    for law in laws:
        law(t)


def cases(rules: Iterable[Rule]) -> Iterator[tuple[Rule, Example]]:
    """Every example and every reject of these rules, for `pytest.mark.parametrize`."""
    tried = examples()
    for rule in rules:
        for example in tried.get(rule.name, ()):
            yield rule, example


class _Checked(fx.Interpreter):
    """Runs a graph and compares what each new node gives with what it says."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if "fusion" in n.meta:
            for real, said in zip(tree_leaves(result), tree_leaves(n.meta["val"]), strict=True):
                if not isinstance(said, Tensor):
                    continue
                have, want = ((each.dtype, tuple(each.shape), _telling(each)) for each in (real, said))
                assert have == want, f"{n.format_node()} gives {have} and says {want}"
            self._check_memory(n, tree_leaves(result))
        return result

    def _check_memory(self, n: fx.Node, results: Sequence[Any]) -> None:
        """What a fused operator gives is memory of its own, but what its schema says it writes."""
        if not isinstance(n.target, OpOverload) or operator_of(n.target) is None or schema_of(n.target).is_mutable:
            return
        given = [each for each in map(self.env.get, n.all_input_nodes) if isinstance(each, Tensor)]
        tensors = [each for each in (*given, *results) if isinstance(each, Tensor) and each.numel()]
        shared = [
            one
            for one, other in combinations(tensors, 2)
            if not any(other is each for each in given) and shares_memory(one, other)
        ]
        assert not shared, f"{n.format_node()} gives memory that it was given, or gives it twice"


def _telling(x: Tensor) -> tuple[int, ...]:
    """The strides of the dims that have several entries."""
    return tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel())


def _run(gm: fx.GraphModule, inputs: Sequence[Any], count: int) -> list[Any]:
    """Results, and the first `count` inputs as they are afterwards."""
    results = gm(*inputs)
    return [*tree_leaves(results), *inputs[:count]]


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return [_like(each) if isinstance(each, Tensor) else each for each in inputs]


def _like(x: Tensor) -> Tensor:
    """A copy of `x` that lies in memory as `x` does."""
    memory = x.detach().untyped_storage().clone()
    return x.new_empty(0).set_(memory, x.storage_offset(), x.shape, x.stride())


def _text(graph: fx.Graph) -> list[str]:
    return [f"{node.name} {node.target} {node.args} {node.kwargs}" for node in graph.nodes]
