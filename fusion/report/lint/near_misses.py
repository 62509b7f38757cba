"""Linters of near misses: norms that stay among fused ones, and sizes that are close to what an operator takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch.fx as fx

from fusion._torch.operators import short_name
from fusion.graph.origin import location, module_path
from fusion.operators import limit_texts
from fusion.records import Refusal
from fusion.report.lint.finding import Finding, at
from fusion.report.lint.kernels import inputs_of, is_fused, is_of_model, kernels, readers_of
from fusion.report.refusals import STAY

_BEFORE: tuple[tuple[frozenset[str], bool], ...] = (
    (frozenset({"add"}), False),
    (frozenset({"mean", "sum", "var"}), True),
    (frozenset({"pow", "square", "mul"}), False),
    (frozenset({"_to_copy"}), False),
)
"""Calls before the `rsqrt` of a norm, the last first, and True for those that no norm lacks."""
_AFTER = frozenset({"mul", "_to_copy"})
_FACTORS = 3
"""Number of calls behind the `rsqrt` of a norm, at most: x * rsqrt, a cast, and the weight."""


def unfused_norms(source: fx.Graph, refusals: Sequence[Refusal]) -> Iterator[Finding]:
    """Find norms that run as single calls while the norms before and after them are fused."""
    calls = list(kernels(source))
    fused = [place for place, node in enumerate(calls) if is_fused(node) and "norm" in short_name(node.target)]
    for place, node in enumerate(calls):
        steps = _norm_around(node)
        if not steps or not fused or not fused[0] < place < fused[-1]:
            continue
        reason = _norm_reason(node, refusals)
        if STAY in reason:
            continue
        other = short_name(calls[fused[0]].target)
        yield at(
            node,
            "unfused_norms",
            f"norm: it runs as {len(steps)} calls between norms that are {other}",
            reason or "write x * rsqrt(mean(x²) + eps) * weight of one x, as the other norms of the model are",
            len(steps) - 1,
        )


def _norm_around(root: fx.Node) -> list[fx.Node]:
    """List the calls of the norm that has the `rsqrt` call `root`; empty if it is none."""
    if short_name(root.target) != "rsqrt" or not is_of_model(root):
        return []
    steps = [root]
    for names, is_needed in _BEFORE:
        before = [each for each in inputs_of(steps[-1]) if _is_step(each, names, root)]
        if is_needed and not before:
            return []
        steps += before[:1]
    return steps + _factors(root)


def _factors(root: fx.Node) -> list[fx.Node]:
    """List the calls behind `root` that multiply or cast the normed tensor, each read by the next alone."""
    factors = [root]
    while len(factors) <= _FACTORS:
        readers = readers_of(factors[-1])
        if len(readers) != 1 or not _is_step(readers[0], _AFTER, root):
            break
        factors += readers
    return factors[1:]


def _is_step(node: fx.Node, names: frozenset[str], root: fx.Node) -> bool:
    return short_name(node.target) in names and is_of_model(node) and module_path(node) == module_path(root)


def _norm_reason(node: fx.Node, refusals: Sequence[Refusal]) -> str:
    """Return the reason of the refused norm at the line or in the module of `node`, "" without one."""
    norms = [each for each in refusals if "norm" in each.rule]
    at_line = [each for each in norms if each.where == location(node) and each.module == module_path(node)]
    inside = [each for each in norms if each.module == module_path(node) != ""]
    return next((each.reason for each in (*at_line, *inside)), "")


_LIMIT = re.compile(
    r"^(?P<facts>.*?); (?P<operator>[\w.]+) on (?P<chip>\w+)(?: under \w+)? requires (?P<text>[^:;]+?)"
    r"(?P<unproven>, which is not proven)?(?:$|[:;])"
)
"""Form of the reason of a limit that is broken."""
_SIZE = re.compile(r"\b(?P<name>\w+)(?: \([^)]*\) is| is|:) (?P<size>\d+)\b")
_MULTIPLE = re.compile(r"\b(?P<name>\w+) % (?P<of>\d+) == 0")


def close_sizes(source: fx.Graph, refusals: Sequence[Refusal]) -> Iterator[Finding]:
    """Find sizes that the next multiple of a number would make acceptable to an operator."""
    for each in refusals:
        limit = _LIMIT.match(each.reason)
        if limit is None or limit["unproven"]:
            continue
        sizes = {size["name"]: int(size["size"]) for size in _SIZE.finditer(limit["facts"])}
        for name, size, multiple in _next_multiples(limit["text"], sizes):
            what = f"{name}: it is {size}; {limit['operator']} on {limit['chip']} requires {limit['text']}"
            cure = f"make {name} {multiple}, by padding or by the config, and {each.rule} fuses as far as this limit"
            yield Finding("close_sizes", each.module, each.where, what, cure)


def _next_multiples(text: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and next acceptable size for each of `sizes` whose next multiple makes the limit `text` hold."""
    for condition in _MULTIPLE.finditer(text):
        name, of = condition["name"], int(condition["of"])
        if name not in sizes or limit_texts.names(text) - set(sizes):
            continue
        multiple = -(-sizes[name] // of) * of
        if multiple > sizes[name] and limit_texts.holds(text, {**sizes, name: multiple}):
            yield name, sizes[name], multiple
