"""The contracts against the real torch_npu 2.13.0: schemas, mutations, and what its Meta kernels return."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fusion.operators import OPERATORS
from fusion.routes.ge_operators import GE_OPERATORS
from tests.support import torch_npu_host
from tests.support.torch_npu_host import requires_torch_npu

pytestmark = requires_torch_npu

SOURCE = """
import json, torch, torch_npu, torchair
from torchair._ge_concrete_graph.fx2ge_converter import _get_converter
from fusion.operators import OPERATORS, ensure
from tests.operators.cases import CASES, described, flat
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch_npu.op_plugin.meta import _meta_registrations

_meta_registrations.get_cann_version = lambda: "8.5.0"  # the stubs tell none, and turned weights are newer than that
ensure()
METAS_OF_ATB = ("atb::npu_multi_head_latent_attention", "atb::npu_multi_head_latent_attention.lse")

def accepted(op, call):
    floats = {n: v.dtype for n, v in call.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return all(dtype in op.dtypes.get(n, {dtype}) for n, dtype in floats.items())

schemas, mutable, converters, metas = {}, {}, {}, []
for name, op in OPERATORS.items():
    real = op.overload()._schema
    schemas[name] = str(real)
    mutable[name] = real.is_mutable or any(a.alias_info is not None for a in [*real.arguments, *real.returns])
    if not name.endswith((".tensor_lengths", ".functional", ".in_place")):
        converters[name] = _get_converter(op.overload()) is not None
for case in CASES:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        call = tree_map_only(Tensor, lambda each: each.to("meta"), case.arguments(dtype))
        op = OPERATORS[case.name]
        if "::" in case.operator and case.operator not in METAS_OF_ATB:
            continue  # torch_npu has no Meta kernel of it
        if call.get("k", 0) is None:
            continue  # its Meta kernel compares None with 0
        if not accepted(op, call):
            continue  # what the Meta kernel says of a dtype that no chip takes means nothing
        theirs, ours = (list(map(described, flat(f(**call)))) for f in (op.overload(), op.meta))
        metas.append([f"{case} {dtype}", str(theirs), str(ours)])
print("TOLD " + json.dumps({"schemas": schemas, "mutable": mutable, "converters": converters, "metas": metas}))
"""


@pytest.fixture(scope="module")
def vendor() -> dict[str, Any]:
    done = torch_npu_host.run(SOURCE)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("TOLD ")).removeprefix("TOLD "))


@pytest.mark.rotates(7)
def test_schemas_are_the_vendors(vendor: dict[str, Any]):
    assert vendor["schemas"] == {name: op.schema for name, op in OPERATORS.items()}


@pytest.mark.rotates(12)
def test_the_vendors_schemas_declare_the_writes_that_ours_do(vendor: dict[str, Any]):
    assert vendor["mutable"] == {name: bool(op.written) for name, op in OPERATORS.items()}


def test_meta_kernels_return_what_ours_say(vendor: dict[str, Any]):
    assert len(vendor["metas"]) > 100
    assert not [line for line in vendor["metas"] if line[1] != line[2]]


def test_torchair_is_named_where_there_is_a_converter(vendor: dict[str, Any]):
    ours = {name for name in OPERATORS if name.endswith((".tensor_lengths", ".functional", ".in_place"))}
    ours |= {name for name in OPERATORS if name.startswith("own_")}  # of packages that other tests install
    named = {name: "torchair" in op.lowerings for name, op in OPERATORS.items() if name not in ours}
    # Two return what the functional form returns, more results than the schema has.
    more = dict.fromkeys(("npu::npu_mla_prolog_v3", "npu::npu_qkv_rms_norm_rope_cache"), True)
    converted_here = {f"npu::{name}" for name in ("npu_kv_rmsnorm_rope_cache_v2", *GE_OPERATORS)}
    of_packages = dict.fromkeys(("custom::npu_hc_pre", "custom::npu_hc_post"), False)  # converters of another package
    mended = more | dict.fromkeys(converted_here, False) | of_packages
    assert vendor["converters"] == named | mended
