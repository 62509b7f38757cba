"""Cache of rewrites: an equal graph is rewritten node by node as the first one was, without a search.

Graphs are equal if their nodes are, in order, by name, call and metadata of the result, along with all facts about
their inputs, the options, the target and every line of the code. Symbolic sizes belong to one graph: graphs with them
are never cached.
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.fakes import FakeTensor, fake_tensor
from fusion._torch.nested import map_only
from fusion._torch.operators import OpOverload
from fusion._torch.tensors import attribute_of
from fusion._torch.tracing import refill
from fusion.caching.text_cache import TextCache, text_cache
from fusion.facts import Facts
from fusion.graph.origin import inherit
from fusion.language import Library
from fusion.language.cache_keys import keys_of
from fusion.options import Options
from fusion.planning.plan_json import Maker, UnwrittenError, read, written
from fusion.planning.target import Target
from fusion.planning.usable_packages import Usable
from fusion.records import Output, Prepared
from fusion.report.outcome import Outcome

log = logging.getLogger("fusion")

MOST = 128
"""Most graphs in a file, the latest ones."""
SMALL = 64
"""Most entries of a constant, which is part of the key; a graph with a larger one is not cached."""

Numbers = dict[fx.Node, int]


@dataclass(frozen=True)
class Before:
    """A node before the rewrite.

    Attributes:
        number: its position in the graph.
        target: the called operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
        val: its fake result.
    """

    number: int
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    val: Any

    def is_still(self, node: fx.Node) -> bool:
        """Return True if `node` still has this target, these arguments, and the same object `val` as its result."""
        return (node.target, node.args, node.kwargs) == (self.target, self.args, self.kwargs) and (
            node.meta.get("val") is self.val
        )


@dataclass(frozen=True)
class Entry:
    """A graph and its key in the cache.

    Attributes:
        digest: the key.
        source: the graph.
        facts: the facts about its inputs.
        before: its nodes before the rewrite.
        make: makes fake tensors of its mode.
        graphs: the cache.
    """

    digest: str
    source: fx.Graph
    facts: Facts
    before: dict[fx.Node, Before]
    make: Maker
    graphs: TextCache

    def replayed(self, original: fx.Graph, check: Callable[[Outcome], None]) -> Outcome | None:
        """Rewrite the graph as an equal one was; return None and restore `original`, its copy, if none is stored.

        `check` raises if the rewritten graph does not keep the contract of the original.
        """
        text = self.graphs.get(self.digest)
        if text is None:
            return None
        try:
            outcome = self._made_again(json.loads(text))
            check(outcome)
        except Exception as error:  # another process may have written anything to the file
            log.debug("a graph that was kept is of no use: %r", error)
            refill(self.source, original)
            self.before.clear()
            self.before.update(_nodes(self.source))
            return None
        return outcome

    def _made_again(self, recorded: Mapping[str, Any]) -> Outcome:
        given = {each.number: node for node, each in self.before.items()}
        at: fx.Node | None = None
        for row in recorded["nodes"]:
            node = given[row] if isinstance(row, int) else self._placed(row, given, at)
            if at is not None and node.prev is not at:
                at.append(node)
            at = node
        left = {row if isinstance(row, int) else row[0] for row in recorded["nodes"]}
        for node, each in reversed(list(self.before.items())):
            if each.number not in left:
                self.source.erase_node(node)
        modules: dict[str, fx.GraphModule] = {}
        prepared = tuple(_prepared(each, modules) for each in recorded["prepared"])
        return Outcome(self.facts, assumed=frozenset(recorded["assumed"]), prepared=prepared, is_replayed=True)

    def _placed(self, row: Sequence[Any], given: dict[int, fx.Node], at: fx.Node | None) -> fx.Node:
        """Insert the node that `row` describes behind `at`, or before all others if None; or update the node if it
        exists.

        `row` is one entry of the stored rewrite: number, op, target, arguments, name, fake result, parent and rule.
        `given` maps numbers to nodes, and gets the new one.
        """
        number, op, target, args, kwargs, name, val, parent, fused = row
        args, kwargs = _argument(args, given, self.make), _argument(kwargs, given, self.make)
        if number in given:
            node = given[number]
            node.target, node.args, node.kwargs = _called(op, target), args, kwargs
        else:
            with self.source.inserting_after(at) if at else self.source.inserting_before(given[0]):
                node = given[number] = self.source.create_node(op, _called(op, target), args, kwargs, name)
            inherit(node, given[parent])
        if val is not None:
            node.meta["val"] = read(val, self.make)
        if fused is not None:
            node.meta["fusion"] = dict(fused)
        return node

    def keep(self, outcome: Outcome) -> None:
        """Store the rewritten graph; not after a failure, nor if a node has no lossless JSON."""
        if outcome.failures:
            return
        try:
            text = json.dumps(self._recorded(outcome))
        except UnwrittenError:
            return
        self.graphs.put(self.digest, text)
        self.graphs.save()

    def _recorded(self, outcome: Outcome) -> dict[str, Any]:
        numbers: Numbers = {node: each.number for node, each in self.before.items()}
        parents: dict[Any, int] = {}
        for node, each in self.before.items():
            parents.setdefault(_provenance(node), each.number)
        return {
            "nodes": [self._row(node, numbers, parents) for node in self.source.nodes],
            "prepared": list(map(_recipe, outcome.prepared)),
            "assumed": sorted(outcome.assumed),
        }

    def _row(self, node: fx.Node, numbers: Numbers, parents: Mapping[Any, int]) -> Any:
        before = self.before.get(node)
        if before is not None and before.is_still(node):
            return before.number
        call = call_row(node, numbers)
        number = numbers.setdefault(node, len(numbers))
        looks = None if before is not None and node.meta.get("val") is before.val else written(node.meta["val"])
        parent = None if before is not None else parents.get(_provenance(node), 0)
        return [number, *call, node.name, looks, parent, node.meta.get("fusion")]


def entry(source: fx.Graph, facts: Facts, library: Library, options: Options) -> Entry | None:
    """Find the cache entry of a graph; None where it cannot be cached.

    A graph that is to be dumped is searched anew, so that every stage can be dumped.
    """
    graphs = text_cache("graphs", library, options, MOST)
    mode = next((val.fake_mode for node in source.nodes if isinstance(val := node.meta.get("val"), FakeTensor)), None)
    if graphs is None or mode is None or options.dump_dir or (keys := keys_of(library)) is None:
        return None
    try:
        recorded = [node_key(node) for node in source.nodes]
    except UnwrittenError:
        return None
    known = [
        sorted(facts.parameters),
        sorted(facts.assumed.items()),
        sorted(facts.fractal.items()),
        sorted(facts.bands.items()),
        sorted(facts.arguments.items()),
        facts.strides,
        facts.prepares,
    ]
    machine = Target.resolve(options.target).name, repr(Usable.of(options.packages))
    parts = [*recorded, keys, *machine, repr(options.key()), repr(known)]
    digest = sha256("\n".join(parts).encode()).hexdigest()
    return Entry(digest, source, facts, _nodes(source), partial(fake_tensor, mode), graphs)


def _nodes(source: fx.Graph) -> dict[fx.Node, Before]:
    return {
        node: Before(number, node.target, node.args, node.kwargs, node.meta.get("val"))
        for number, node in enumerate(source.nodes)
    }


def node_key(node: fx.Node) -> str:
    """Format all properties of a node that the search reads.

    Raises:
        UnwrittenError: a property cannot be part of a key, such as a symbolic size.
    """
    if node.op == "get_attr":
        constant = attribute_of(node)
        if not isinstance(constant, torch.Tensor) or constant.numel() > SMALL or isinstance(constant, FakeTensor):
            raise UnwrittenError
        return f"{node.name} {result_look(constant)} {constant.tolist()}"
    return f"{node.name} {node.op} {call_name(node)} {node.args} {node.kwargs} {result_look(node.meta.get('val'))}"


def call_name(node: fx.Node) -> str:
    """Return the target of `node` as text.

    Raises:
        UnwrittenError: the node calls a Python function other than getitem.
    """
    if node.op != "call_function" or isinstance(node.target, OpOverload):
        return str(node.target)
    if node.target is not operator.getitem:
        raise UnwrittenError
    return "getitem"


def result_look(val: Any) -> str:
    """Describe the metadata of the result `val` of a node: dtype, shape, strides and device of its tensors.

    Raises:
        UnwrittenError: a size is symbolic, or a part of `val` is neither a tensor nor a number.
    """
    match val:
        case torch.Tensor():
            if not all(type(each) is int for each in val.shape):
                raise UnwrittenError
            return (
                f"{tuple(val.shape)} {val.stride()} {val.storage_offset()} {val.dtype} {val.device} {val.layout} "
                f"{val.requires_grad} {type(val).__name__}"
            )
        case tuple() | list():
            return f"[{' '.join(map(result_look, val))}]"
        case None | bool() | int() | float():
            return repr(val)
        case _:
            raise UnwrittenError


def _provenance(node: fx.Node) -> tuple[int, int]:
    """Return ids of the stack trace and module stack, which new nodes inherit from the node that they replace."""
    return id(node.meta.get("stack_trace")), id(node.meta.get("nn_module_stack"))


def call_row(node: fx.Node, numbers: Numbers) -> list[Any]:
    """Encode the call of a node as JSON; operands that are nodes become `Output` by `numbers`."""
    if node.op not in ("call_function", "placeholder", "output"):
        raise UnwrittenError
    target = written(node.target) if isinstance(node.target, OpOverload) else call_name(node)
    args, kwargs = map_only(fx.Node, lambda each: Output(numbers[each], None), (node.args, node.kwargs))
    return [node.op, target, written(args), written(kwargs)]


def _called(op: str, target: Any) -> Any:
    if op != "call_function":
        return target
    return operator.getitem if target == "getitem" else read(target, torch.empty_strided)


def _argument(text: Any, given: Mapping[int, fx.Node], make: Maker) -> Any:
    return map_only(Output, lambda each: given[each.step], read(text, make))


def _recipe(prepared: Prepared) -> list[Any]:
    numbers: Numbers = {}
    rows: list[Any] = []
    for node in prepared.module.graph.nodes:
        rows.append(call_row(node, numbers))
        numbers[node] = len(numbers)
    return [prepared.name, list(prepared.sources), prepared.key, prepared.size, prepared.copied, rows]


def _prepared(recorded: Sequence[Any], modules: dict[str, fx.GraphModule]) -> Prepared:
    name, sources, key, size, copied, rows = recorded
    if key not in modules:
        graph = fx.Graph()
        given: dict[int, fx.Node] = {}
        for number, (op, target, args, kwargs) in enumerate(rows):
            read_back = (_argument(each, given, torch.empty_strided) for each in (args, kwargs))
            given[number] = graph.create_node(op, _called(op, target), *read_back)
        modules[key] = fx.GraphModule({}, graph)
    return Prepared(name, tuple(sources), modules[key], key, size, copied)
