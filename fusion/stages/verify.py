"""Stage verify: check that a rewritten graph has the inputs, outputs, writes and order of the original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap, zip_longest
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.nested import map_only
from fusion.errors import FormatError, VerificationError
from fusion.graph import dims_of
from fusion.graph.aliasing import closing_writes, is_write, memory_of, outputs, sharing, written_by
from fusion.inputs.nz_format import may_be_fractal
from fusion.operators import operator_of


@dataclass(frozen=True)
class Contract:
    """Everything except the numbers that a caller can observe of a graph.

    Attributes:
        inputs: names of the placeholders.
        outputs: shape, dtype and device of each output; the type name of an output that is no tensor.
        strides: for each output its allowed strides, without those of dims of size 1.
        sharing: for each output the input or the earlier output whose memory it shares.
        written: names of the inputs that are written to, in the order of the inputs.
        between: the user's own writes before the closing ones, each with its operator and destination, in order.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Any, ...]
    strides: tuple[frozenset[Any], ...]
    sharing: tuple[str, ...]
    written: tuple[str, ...]
    between: tuple[str, ...]


def contract(source: fx.Graph, eager: Sequence[tuple[Any, ...] | None] = ()) -> Contract:
    """Derive the contract of the graph `source`.

    `eager` has for each output the strides that it has when the model runs uncompiled, which are allowed as well.
    """
    inputs = tuple(node.name for node in source.nodes if node.op == "placeholder")
    writes = [node for node in source.nodes if is_write(node)]
    closing = closing_writes(source)
    own = [node for node in writes if node not in closing and "fusion" not in node.meta]
    named = {name for node in writes for name in _targets(node)}
    vals = [node.meta.get("val") for node in outputs(source)]
    return Contract(
        inputs,
        tuple(map(_observed, vals)),
        tuple(starmap(result_strides, zip_longest(vals, eager[: len(vals)]))),
        sharing(source),
        tuple(name for name in inputs if name in named),
        tuple(f"{node.target} of {_targets(node)}" for node in own),
    )


def _targets(node: fx.Node) -> list[str]:
    return [memory_of(each).name for each in written_by(node)]


def _observed(val: Any) -> Any:
    return (dims_of(val.shape), val.dtype, str(val.device)) if isinstance(val, torch.Tensor) else type(val).__name__


def result_strides(val: Any, eager: tuple[Any, ...] | None) -> frozenset[Any]:
    """Collect the allowed strides of the output `val`: its own and those of `eager`.

    Strides of dims of size 1 and of empty tensors are left out, as no access depends on them.
    """
    if not isinstance(val, torch.Tensor):
        return frozenset()
    shape = dims_of(val.shape)
    strides = [dims_of(val.stride()), *([eager] if eager is not None else [])]
    used = [place for place, size in enumerate(shape) if size != 1 and 0 not in shape]
    return frozenset(tuple(each[place] for place in used) for each in strides)


def verify(source: fx.Graph, before: Contract, added: Sequence[fx.Node], prepared: Sequence[str] = ()) -> None:
    """Check that a rewritten graph has the contract of the original and is well formed.

    Args:
        source: the rewritten graph.
        before: the contract of the original.
        added: the new nodes, which must have fake tensors.
        prepared: names of the inputs that `source` has beyond those of the original, in order.

    Raises:
        VerificationError: a check fails; the graph must not be used.
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
    """Check that calls of the pass read tensors in FRACTAL_NZ exactly where their operators need that.

    Results of the graph itself are never in FRACTAL_NZ.

    Args:
        source: the rewritten graph, as it is lowered.
        fractal: for each input that may be in FRACTAL_NZ, True if it is.

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
