"""Stage 10, verify: a rewritten graph has the same inputs, outputs and writes as before, in a valid order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap, zip_longest
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.tensors import map_only
from fusion.errors import FormatError, VerificationError
from fusion.graph import dims_of
from fusion.graph.aliasing import closing_writes, is_write, memory_of, outputs, sharing, written_by
from fusion.inputs.nz_format import may_be_fractal
from fusion.operators import operator_of


@dataclass(frozen=True)
class Contract:
    """What a caller can observe of a graph, apart from its numbers.

    `strides` are those that each output may have, without those of dims of size 1; `sharing` says of each output whose
    memory it is; `written` are the inputs that are written to, in the order of the inputs; `between` are the writes in
    the middle of the graph that are the user's own, by input, in their order.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Any, ...]
    strides: tuple[frozenset[Any], ...]
    sharing: tuple[str, ...]
    written: tuple[str, ...]
    between: tuple[str, ...]


def contract(source: fx.Graph, eager: Sequence[tuple[Any, ...] | None] = ()) -> Contract:
    """Inputs by name, outputs by shape, dtype, strides and memory, and the inputs that are written to.

    `eager` are the strides that each output may have as well: those that it has when the model runs uncompiled.
    """
    inputs = tuple(node.name for node in source.nodes if node.op == "placeholder")
    writes = [node for node in source.nodes if is_write(node)]
    closing = closing_writes(source)
    own = [node for node in writes if node not in closing and "fusion" not in node.meta]
    named = {name for node in writes for name in _targets(node)}
    vals = [node.meta.get("val") for node in outputs(source)]
    return Contract(
        inputs,
        tuple(map(_seen, vals)),
        tuple(starmap(_strides, zip_longest(vals, eager[: len(vals)]))),
        sharing(source),
        tuple(name for name in inputs if name in named),
        tuple(f"{node.target} of {_targets(node)}" for node in own),
    )


def _targets(node: fx.Node) -> list[str]:
    """The inputs, or other nodes, whose memory a call writes into."""
    return [memory_of(each).name for each in written_by(node)]


def _seen(val: Any) -> Any:
    return (dims_of(val.shape), val.dtype, str(val.device)) if isinstance(val, torch.Tensor) else type(val).__name__


def _strides(val: Any, eager: tuple[Any, ...] | None) -> frozenset[Any]:
    """How a tensor lies and may lie, without what says nothing: strides of dims of size 1, and of empty tensors."""
    if not isinstance(val, torch.Tensor):
        return frozenset()
    shape = dims_of(val.shape)
    lies = [dims_of(val.stride()), *([eager] if eager is not None else [])]
    telling = [place for place, size in enumerate(shape) if size != 1 and 0 not in shape]
    return frozenset(tuple(each[place] for place in telling) for each in lies)


def verify(source: fx.Graph, before: Contract, added: Sequence[fx.Node], prepared: Sequence[str] = ()) -> None:
    """Check a rewritten graph against the contract of the original, and its new nodes against their own operators.

    `prepared` names the inputs that it has beyond those of the original, in order.

    Raises:
        VerificationError: they differ; the graph must not be used.
    """
    before = replace(before, inputs=(*before.inputs, *prepared))
    after = contract(source)
    if all(map(frozenset.issubset, after.strides, before.strides)):
        after = replace(after, strides=before.strides)
    if after != before:
        raise VerificationError(
            f"verifying the rewritten graph: it has {after} where the original has {before}; "
            "this is a defect of a rule: run with fuel=0, 1, ... to find which rewrite it is, and report it"
        )
    source.lint()
    order = {node: position for position, node in enumerate(source.nodes)}
    for node in added:
        if node in order and node.meta.get("val") is None:
            raise VerificationError(f"verifying the rewritten graph: new node {node.name} has no shape")


def verify_formats(source: fx.Graph, fractal: Mapping[str, bool]) -> None:
    """Check that what a call of the pass reads in FRACTAL_NZ is an input that lies so, and what it reads otherwise not.

    What a graph computes lies as its shape says.

    Args:
        source: the rewritten graph, as it is lowered.
        fractal: of each input that may lie so, whether it does.

    Raises:
        FormatError: the storage format of a tensor is another one, or unknown; the graph must not be used.
    """
    for node in source.nodes:
        operator = operator_of(node.target) if "fusion" in node.meta else None
        if operator is None or operator.fractal is None:
            continue
        given = operator.bind(node.args, node.kwargs)
        args, kwargs = map_only(fx.Node, lambda each: each.meta["val"], (node.args, node.kwargs))
        for name, wanted in operator.formats(args, kwargs).items():
            if _is_fractal(memory_of(given[name]), fractal) is not wanted:
                raise FormatError(
                    f"verifying the rewritten graph: {node.name} reads {name} {'' if wanted else 'not '}in FRACTAL_NZ, "
                    f"and that is not proven of {given[name].name}"
                )


def _is_fractal(memory: fx.Node, fractal: Mapping[str, bool]) -> bool | None:
    if memory.op != "placeholder":
        return False
    return fractal.get(memory.name, None if may_be_fractal(memory.meta.get("val")) else False)
