"""Names of values: the variable of the model's line, else the argument that reads the value, else the operator."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from fusion._torch.operators import short_name
from fusion.frontend.port.expressions import is_fused, operands
from fusion.frontend.port.frames import Frame, is_item
from fusion.frontend.port.lines import is_part, statement_of, statements_of
from fusion.frontend.port.traced import Argument, Weight
from fusion.graph.launches import is_view
from fusion.graph.origin import module_chain
from fusion.records import Prepared

if TYPE_CHECKING:
    from fusion.frontend.port.weights import Tensors

_BY_OPERATOR: dict[str, str] = {
    "npu_rms_norm": "normed", "npu_add_rms_norm": "normed", "npu_swiglu": "activated", "linear": "projected",
    "npu_fused_infer_attention_score_v2": "attn_output", "clamp": "bounded", "where": "selected", "lt": "is_valid",
    "arange": "steps", "mul": "product", "add": "total", "cat": "joined", "npu_transpose_batchmatmul": "projected",
    "npu_grouped_matmul": "expert_rows", "npu_clipped_swiglu": "activated", "npu_moe_finalize_routing": "combined",
    "npu_interleave_rope": "rotated", "npu_rotary_mul": "rotated", "bmm": "product", "npu_dynamic_quant": "quantised",
    "mm": "product", "matmul": "product", "sub": "difference", "index": "rows", "sigmoid": "gate",
    "constant_pad_nd": "padded", "div": "quotient", "bitwise_not": "inverted", "logical_not": "inverted",
    "convolution": "convolved", "pow": "power", "clone": "copied", "copy": "copied", "floor_divide": "quotient",
    "abs": "magnitude",
}  # fmt: skip
"""Names of results of operators whose own name would say less."""
_ITEMS: dict[str, tuple[str, ...]] = {
    "npu_add_rms_norm": ("normed", "rstd", "residual"), "npu_add_layer_norm": ("normed", "mean", "rstd", "residual"),
    "npu_moe_init_routing_v2": ("rows", "row_index", "counts"),
    "npu_add_rms_norm_cast": ("normed_float32", "normed", "rstd", "residual"),
    "npu_dynamic_quant": ("quantised", "scale"), "npu_fused_infer_attention_score_v2": ("attn_output", "lse"),
    "npu_moe_gating_top_k_softmax_v2": ("weights", "experts", "scores"),
    "npu_moe_gating_top_k": ("weights", "experts", "scores"), "npu_apply_rotary_pos_emb": ("query", "key"),
    "npu_mla_prolog_v3": ("query", "query_rope", "dequant_scale_q_nope", "query_norm", "dequant_scale_q_norm"),
}  # fmt: skip
"""Names of the results of operators that have several."""
_UNNAMED = {"input", "self", "x", "x1", "x2", "weight", "gamma", "updates", "tensors", "bias", "mat2", "other"}
"""Arguments of operators whose names say nothing of a value."""
TAKEN = {"torch", "nn", "F", "self", "operators", "_", *dir(builtins)}


class Names:
    """Names of the values in one frame.

    Attributes:
        kind: class of the module.
    """

    def __init__(self, frame: Frame, tensors: Tensors) -> None:
        self.kind = frame.kind
        self._own = {each for each in frame.items if isinstance(each, fx.Node)}
        self._inside = {node: each for each in frame.children for node in each.nodes()}
        self._tensors, self._sources = tensors, tensors.traced.sources

    def of(self, node: fx.Node) -> str:
        """Return the name for the result of the call `node`, or of one that a module inside returns."""
        inside = self._inside.get(node)
        if inside is None:
            name = self.assigned(node) or argument_name(node) or self._by_operand(node) or self._by_layer(node)
            return name or _by_operator(node)
        alone = [each for each in inside.nodes() if self._leaves(each, inside)] == [node]
        return (self._target(node) if alone else "") or Names(inside, self._tensors).of(node)

    def assigned(self, node: fx.Node) -> str:
        """Return the variable that the model assigns `node` to; "" where it is a part of an expression."""
        if is_item(node):
            return self._assigned_item(node)
        if _is_glue(node) or self._is_view_of_weight(node):
            return ""
        around = statements_of(node, self.kind)[self._is_moved(node) :]
        around = [each for each in around if not any(is_part(user, each) for user in node.users)]
        return next((cleaned(each.names[0]) for each in around if len(each.names) == 1), "")

    def _assigned_item(self, node: fx.Node) -> str:
        """Return the variable for one of several results of a call: that of the same place in an assigned tuple."""
        source: Any = node.args[0]
        number: Any = node.args[1]
        statement = statement_of(node, self.kind)
        if statement is None or self._is_moved(node):
            return ""
        if short_name(source.target) in _ITEMS and number > 0:
            return ""
        if len(statement.names) == 1 and is_fused(source) and number == 0:
            return self._target(node) if not _is_read_by(node, statement, self.kind) else ""
        read = sorted({user.args[1] for user in source.users})
        for each in reversed(statements_of(node, self.kind)):
            if len(each.names) == len(read) > 1:
                return cleaned(each.names[read.index(number)])
        readers = [statement_of(user, self.kind) for user in node.users if user in self._own]
        names = {each.names for each in readers if each is not None and len(each.names) == 1}
        return cleaned(names.pop()[0]) if len(names) == 1 and not is_fused(source) else ""

    def _target(self, node: fx.Node) -> str:
        statement = statement_of(node, self.kind)
        return cleaned(statement.names[0]) if statement is not None and len(statement.names) == 1 else ""

    def _is_moved(self, node: fx.Node) -> bool:
        """Return True if `node` comes from a submodule that has a frame of its own, whose lines name it."""
        inner = [path for _, path, _ in module_chain(node)]
        frames = {each.path for each in set(self._inside.values())}
        return any(path in frames for path in inner)

    def _is_view_of_weight(self, node: fx.Node) -> bool:
        return is_view(node.target) and isinstance(self._sources.get(node.all_input_nodes[0]), (Weight, Prepared))

    def _leaves(self, node: fx.Node, inside: Frame) -> bool:
        nodes = set(inside.nodes())
        return not nodes.issuperset(node.users) and not isinstance(node.meta.get("val"), (tuple, list))

    def _by_operand(self, node: fx.Node) -> str:
        """Return the name of the tensor of which `node` is a view or a cast."""
        source: Any = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not (is_view(node.target) or short_name(node.target) == "_to_copy"):
            return ""
        if is_item(node):
            return ""
        given = self._sources.get(source)
        if given is not None:
            text = given.expression if isinstance(given, Argument) else self._tensors.paths.get(source, "")
            steps = [each for each in re.split(r"[.\[\]]+", text) if each not in ("weight", "")]
            return cleaned(steps[-1]) if steps else ""
        return self.of(source)

    def _by_layer(self, node: fx.Node) -> str:
        """Return the name of the layer that computes `node`; of a part of joined layers, that of the part."""
        source: Any = node.args[0] if is_item(node) and node.args else None
        if source is None:
            return cleaned(self._tensors.layer_of(node).rpartition(".")[2].removesuffix("_proj"))
        made: Any = source.args[0]
        weight: Any = made.args[1] if isinstance(made, fx.Node) and self._tensors.layer_of(made) else None
        prepared = self._sources.get(weight)
        if not isinstance(prepared, Prepared) or len(prepared.sources) != len(source.meta["val"]):
            return ""
        paths = {each.name: given for each, given in self._sources.items()}
        number: Any = node.args[1]
        part = paths[prepared.sources[number]]
        return cleaned(part.path.split(".")[-2].removesuffix("_proj")) if isinstance(part, Weight) else ""


def argument_name(node: fx.Node) -> str:
    """Return the name of the argument as which a fused operator reads `node`; "" where none does."""
    for user in node.users:
        read = [name for name, value in operands(user) if value is node] if is_fused(user) else []
        if read and read[0] not in _UNNAMED:
            return cleaned(read[0])
    return ""


def _is_glue(node: fx.Node) -> bool:
    """Return True if `node` is a view or a cast that a rewrite added: it has the line of what it replaces."""
    return "fusion" in node.meta and (is_view(node.target) or short_name(node.target) == "_to_copy")


def _is_read_by(node: fx.Node, statement: Any, kind: Any) -> bool:
    return any(statement_of(user, kind) == statement for user in node.users)


def _by_operator(node: fx.Node) -> str:
    if is_item(node):
        source: Any = node.args[0]
        number: Any = node.args[1]
        several = _ITEMS.get(short_name(source.target), ())
        return several[number] if number < len(several) else _by_operator(source)
    name = short_name(node.target) or str(getattr(node.target, "__name__", "value"))
    return _BY_OPERATOR.get(name) or cleaned(name) or "value"


def cleaned(name: str) -> str:
    """Return `name` as a variable: an identifier in lower case without leading underscores that is no keyword."""
    name = re.sub(r"\W", "_", name).strip("_").removeprefix("npu_").lower()
    if not name or name[0].isdigit():
        return ""
    return name + "_" if keyword.iskeyword(name) or name in TAKEN or name == "l" else name


def distinct(name: str, taken: Collection[str]) -> str:
    """Return `name`, with the least number behind it that makes it new among `taken`."""
    if name not in taken:
        return name
    return next(each for each in (f"{name}_{number}" for number in range(2, len(taken) + 3)) if each not in taken)


def name_of_item(container: str) -> str:
    """Name an item of a `container`: "past_key_values.layers" gives "past_key_value", "model.layers" "layer"."""
    steps = re.findall(r"[A-Za-z_]\w*", container) or ["item"]
    name = steps[0] if steps[-1] == "layers" and steps[0] not in ("model", "self") else steps[-1]
    if name.endswith("ies"):
        return name[:-3] + "y"
    return cleaned(name[:-1] if name.endswith("s") and not name.endswith("ss") else name + "_item")


def name_of_object(expression: str) -> str:
    """Name the object that an argument's `expression` reads: "past_key_values.layers[0]" gives "past_key_value"."""
    quoted = re.search(r"\[['\"](\w+)['\"]\]$", expression)
    if quoted is not None:
        return cleaned(quoted[1])
    if expression.endswith("]"):
        return name_of_item(expression.rpartition("[")[0])
    return cleaned(re.split(r"[.\[]", expression)[-1])
