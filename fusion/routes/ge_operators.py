"""Operators of GE that compute operators of torch_npu for which torchair 2.13.0 has no converter.

Names, order and attributes are those of the prototypes in ops-nn: norm/add_layer_norm, norm/add_rms_norm_quant and
quant/swi_glu_quant. npu_rms_norm_quant is missing: RmsNormQuant has no prototype for graphs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion._torch.operators import OpOverload, arguments_of
from fusion.operators.calling import Given


@dataclass(frozen=True)
class GeOperator:
    """One operator of GE.

    Attributes:
        name: its type.
        inputs: arguments of the schema that are its inputs, in its order.
        outputs: the names of its results.
        attributes: arguments of the schema that are its attributes, with the name of their class in `torchair.ge.attr`.
        texts: of a number in the schema that is text in GE, the text of each number.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, str]
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def call(self, ge: Any, given: Given) -> Any:
        """Add the operator to the graph that `ge` builds, without inputs that are None: older versions lack some."""
        inputs = {name: given[name] for name in self.inputs if given[name] is not None}
        values = {**given, **{name: texts[given[name]] for name, texts in self.texts.items()}}
        attrs = {name: getattr(ge.attr, kind)(values[name]) for name, kind in self.attributes.items()}
        return ge.custom_op(self.name, inputs=inputs, outputs=list(self.outputs), attrs=attrs)


GE_OPERATORS: Mapping[str, GeOperator] = {
    "npu_add_layer_norm": GeOperator(
        "AddLayerNorm",
        ("x1", "x2", "gamma", "beta"),
        ("y", "mean", "rstd", "x"),
        {"epsilon": "Float", "additional_output": "Bool"},
    ),
    "npu_add_rms_norm_quant": GeOperator(
        "AddRmsNormQuant",
        ("x1", "x2", "gamma", "scales1", "scales2", "zero_points1", "zero_points2", "beta"),
        ("y1", "y2", "x"),
        {"axis": "Int", "epsilon": "Float", "div_mode": "Bool"},
    ),
    "npu_swiglu_quant": GeOperator(
        "SwiGluQuant",
        ("x", "smooth_scales", "offsets", "group_index"),
        ("y", "scale"),
        {"activate_left": "Bool", "quant_mode": "Str", "group_list_type": "Int"},
        {"quant_mode": ("static", "dynamic")},
    ),
}
"""By the name of the operator of torch_npu."""


def convert_to_ge(register: Callable[[OpOverload], Callable[..., Any]]) -> None:
    """Register a converter of each operator in `GE_OPERATORS` that has none."""
    for name, operator in GE_OPERATORS.items():
        overload = getattr(torch.ops.npu, name).default
        if getattr(overload, "_ge_converter", None) is None:
            register(overload)(_converter(overload, operator))


def _converter(overload: OpOverload, operator: GeOperator) -> Callable[..., Any]:
    ge: Any = importlib.import_module("torchair.ge")

    def converted(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        return operator.call(ge, arguments_of(overload, args, kwargs))

    return converted
