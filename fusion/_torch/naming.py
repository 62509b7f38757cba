"""Names of the inputs and results of graphs in the model's own code."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

_ITEM = r"\[['\"]([^'\"]+)['\"]\]"
_MEMBER = re.compile(rf"\._(?:modules|parameters|buffers){_ITEM}")
_ROOT = re.compile(rf"^[LG]{_ITEM}")
_WRAPPER = re.compile(rf"^(?:(?:self|fn)\.|kwargs{_ITEM})")


def input_name(node: fx.Node) -> str:
    """Name an input of a Dynamo graph as the model does: "layers.1.attn.k_scale", "past_key_values.layers[0].keys".

    Falls back to the name that Dynamo gives the node. Private: the attribute `_dynamo_source` of placeholders.
    """
    source: Any = getattr(node, "_dynamo_source", None)
    return node.name if source is None else _source_name(source)


def _source_name(source: Any) -> str:
    """Return the model's expression for the value of a Dynamo `source`."""
    name = _MEMBER.sub(r".\1", str(source.name))
    return _WRAPPER.sub(r"\1", _ROOT.sub(r"\1", name))


def _is_readable(source: Any) -> bool:
    """Return True if code of the model reads the value of a source; a local of Dynamo's own, as of `tolist`, has no
    name.
    """
    try:
        return bool(source.name)
    except NotImplementedError:
        return False


def is_buffer(node: fx.Node) -> bool:
    """Return True if an input of a Dynamo graph is a buffer of a module.

    Private: `torch._dynamo.source.UnspecializedParamBufferSource` and the attribute `_dynamo_source` of placeholders.
    """
    from torch._dynamo.source import UnspecializedParamBufferSource

    base = getattr(getattr(node, "_dynamo_source", None), "base", None)
    return isinstance(base, UnspecializedParamBufferSource) and base.member == "_buffers"


def result_names(gm: fx.GraphModule) -> list[str]:
    """Name each result of a Dynamo graph by its path in the return value of the function: "output.logits".

    A result that becomes an attribute of an argument is named by that: "past_key_values.layers[0].keys". Any other,
    such as one that the code behind a graph break reads, has the name of its node. To be called while Dynamo compiles
    the graph.
    Private: `torch._dynamo.symbolic_convert.InstructionTranslator`, its stack, and the variables on it.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    results: Sequence[Any] = gm.graph.output_node().args[0]  # pyright: ignore[reportAssignmentType]
    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:  # the caller passed a graph outside of a compilation by Dynamo
        translator = None
    paths: dict[str, str] = {}
    if translator is not None:
        attributes: Mapping[Any, Mapping[str, Any]] = translator.output.side_effects.store_attr_mutations
        returned = translator.stack if translator.current_instruction.opname == "RETURN_VALUE" else ()
        paths = _tensors([*_stored(attributes), *(("output", each) for each in returned)], attributes)
    return [paths.get(each.name, each.name) if isinstance(each, fx.Node) else str(each) for each in results]


def counted_in_python() -> tuple[str, ...]:
    """Name the attributes that the code sets to Python numbers, on objects that exist before the call.

    A graph that reads such a number has it as a constant. To be called while Dynamo compiles the graph.
    Private: `torch._dynamo.symbolic_convert.InstructionTranslator`, and the variables of its side effects.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        attributes = InstructionTranslator.current_tx().output.side_effects.store_attr_mutations
    except AttributeError:  # the caller passed a graph outside of a compilation by Dynamo
        return ()
    numbers = (each for each in _stored(attributes) if each[1].is_python_constant())
    return tuple(name for name, value in numbers if type(value.as_python_constant()) in (int, float))


def _stored(attributes: Mapping[Any, Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """List the attributes that the code sets on objects that exist before the call: expression and variable of each."""
    from torch._dynamo.variables.base import AttributeMutationExisting

    return [
        (f"{_source_name(variable.source)}.{name}", value)
        for variable, named in attributes.items()
        if isinstance(variable.mutation_type, AttributeMutationExisting) and _is_readable(variable.source)
        for name, value in named.items()
    ]


def _tensors(named: Sequence[tuple[str, Any]], attributes: Mapping[Any, Mapping[str, Any]]) -> dict[str, str]:
    """Map the node name of each tensor reachable from the variables of Dynamo in `named` to its expression.

    The last entries of `named` come first: a tensor keeps its first expression. `attributes` are those that the code
    has set on each variable, which lead further.
    """
    paths: dict[str, str] = {}
    waiting, seen = list(named), set[int]()
    while waiting:
        path, variable = waiting.pop()
        if id(variable) in seen:
            continue
        seen.add(id(variable))
        proxy = vars(variable).get("proxy")
        if isinstance(proxy, fx.Proxy):
            paths.setdefault(proxy.node.name, path)
        waiting.extend((path + step, item) for step, item in _items(variable, attributes))
    return paths


def _items(variable: Any, attributes: Mapping[Any, Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """List the items of a variable of Dynamo, each with its subscript or attribute, without realising a lazy one."""
    named = attributes.get(variable, {})
    if named:
        return [(f".{name}", item) for name, item in named.items()]
    items = vars(vars(variable).get("_base_vt") or variable).get("items")
    if isinstance(items, dict):
        plain = [(key.vt, item) for key, item in items.items() if key.vt.is_python_constant()]
        return [(f"[{key.as_python_constant()!r}]", item) for key, item in plain]
    return [(f"[{place}]", item) for place, item in enumerate(items)] if isinstance(items, list) else []


def captured_names(
    source: fx.Graph, inputs: Sequence[str], results: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the inputs and the results of a graph of AOT autograd by those of the Dynamo graph.

    AOT autograd reorders and merges inputs, and returns some that are mutated. Inputs and results without a counterpart
    have the name of their node.
    Private: `torch._functorch._aot_autograd.descriptors` in the meta of nodes.
    """
    output = source.output_node()
    returned: Sequence[Any] = output.args[0]  # pyright: ignore[reportAssignmentType]
    described = output.meta.get("desc") or [None] * len(returned)
    placed = source.find_nodes(op="placeholder")
    return (
        tuple(_described(node.meta.get("desc"), inputs, results) or node.name for node in placed),
        tuple(_described(each, inputs, results) or str(value) for each, value in zip(described, returned, strict=True)),
    )


def _described(descriptor: Any, inputs: Sequence[str], results: Sequence[str]) -> str:
    """Name the input or result that a `descriptor` of AOT autograd refers to; "" where it refers to neither."""
    from torch._functorch._aot_autograd import descriptors as aot

    match descriptor:
        case aot.PlainAOTInput(idx=place):
            return inputs[place]
        case aot.PlainAOTOutput(idx=place):
            return results[place]
        case aot.InputMutationAOTOutput(mutated_input=base) | aot.SyntheticBaseAOTInput(base_of=base):
            return _described(base, inputs, results)
        case aot.ViewBaseAOTInput(base_of=base) | aot.IntermediateBaseAOTOutput(base_of=base):
            return _described(base, inputs, results)
        case aot.SubclassGetAttrAOTInput(base=base, attr=name) | aot.SubclassGetAttrAOTOutput(base=base, attr=name):
            return ".".join(filter(None, (_described(base, inputs, results), name)))
        case _:
            return ""
