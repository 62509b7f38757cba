"""Storage formats: the same tensor in the order in which the matrix unit reads it."""

from __future__ import annotations

import torch

from fusion.operators.contract import A2_A3, Operator
from fusion.operators.dtypes import FLOATS, INT8

ND = 2
FRACTAL_NZ = 29


_LIMITS = ("rank(input) >= 2", "not given(customize_dtype)", "not given(input_dtype)")

FORMAT_CAST = Operator(
    schema=(
        "npu::npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None, int? input_dtype=None) "
        "-> Tensor"
    ),
    # Other devices know no such formats; a result must not share memory with what it was made of.
    compute=lambda input: input.clone(memory_format=torch.contiguous_format),
    outputs=lambda input: input.new_empty(input.shape),
    dims={"input": "*D"},
    dtypes={"input": FLOATS | INT8},
    limits={
        "host": (f"acl_format in ({ND}, {FRACTAL_NZ})",),
        **dict.fromkeys(A2_A3, _LIMITS),
    },
    lowerings=frozenset({"eager"}),
    source="torch_npu.npu_format_cast; it has neither a Meta kernel nor a GE converter in 2.13.0",
    summary="the same values, stored as acl_format says: 2 row-major, 29 fractal NZ; elsewhere a copy",
)
