"""Other versions of torch_npu: a plan calls what they have, and a reason names what they lack."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.errors import OptionError
from fusion.operators import OPERATORS
from fusion.operators.vendor_versions import PREFIX, lack, minor, version_named, versions
from tests.models.families import build
from tests.operators.wheel_versions import TABLE, VERSIONS, table

A3 = {"target": "ascend910_93", "plan_cache": "off"}


def said(version: str, name: str, **given: object) -> str:
    operator = OPERATORS[f"npu::{name}"]
    values = {each: operator.default(each) for each in operator.arguments} | given
    return lack(version, operator, values, frozenset(given))


def test_what_a_version_lacks_is_named():
    x = torch.empty(2)
    assert "torch_npu 2.8 does not have it" in said("2.8", "npu_clipped_swiglu", x=x)
    assert said("2.13", "npu_clipped_swiglu", x=x) == said("2.10", "npu_clipped_swiglu", x=x) == ""
    assert said("2.8", "npu_rotary_mul", input=x) == ""
    assert said("2.8", "npu_rotary_mul", input=x, rotate=x).startswith("rotate: it is given otherwise")
    assert said("2.10", "npu_mhc_post", h_res=None).startswith("h_res:")
    assert said("2.10", "npu_mhc_post", h_res=x) == ""
    assert said("2.10", "npu_apply_rotary_pos_emb").startswith("layout:")  # it has another default there
    assert said("2.10", "npu_apply_rotary_pos_emb", layout="BSND") == ""
    assert said("1.0", "npu_clipped_swiglu", x=x) == ""


def test_versions_are_read_of_names():
    assert version_named({"custom_ops", f"{PREFIX}2.10"}) == "2.10"
    assert version_named({"custom_ops"}) == ""
    assert [minor(each) for each in ("2.10.0.post2", "2.13.0", None)] == ["2.10", "2.13", ""]
    assert [*versions()] == [minor(each) for each in VERSIONS]


def test_a_plan_calls_what_the_version_has():
    def gate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a.clamp(max=7.0)) * b.clamp(-7.0, 7.0)

    x = torch.randn(4, 128, dtype=torch.bfloat16)
    old, new = (fusion.explain(gate, x, options={**A3, "packages": [f"{PREFIX}{each}"]}) for each in ("2.8", "2.14"))
    assert new.ops == {"npu::npu_clipped_swiglu": 1}
    assert not old.ops
    assert any("torch_npu 2.8 does not have it" in each.reason for each in old.refusals)


@pytest.mark.rotates(24)
@pytest.mark.parametrize("version", ["2.7", "2.8", "2.10"])
def test_every_call_of_a_model_is_one_that_the_version_takes(version: str):
    built = build("DeepseekV32", torch.bfloat16)
    report = fusion.explain(
        built.model, **built.step("decode_static"), options={**A3, "packages": [f"{PREFIX}{version}"]}
    )
    for gm in report.graphs:
        for node in gm.graph.nodes:
            operator = OPERATORS.get(getattr(node.target, "name", lambda: "")()) if node.op == "call_function" else None
            if operator is not None:
                given = operator.bind(node.args, node.kwargs)
                written = frozenset([*list(operator.arguments)[: len(node.args)], *node.kwargs])
                assert lack(version, operator, given, written) == ""


def test_a_version_that_is_not_known_is_an_error():
    with pytest.raises(OptionError, match=r"torch_npu==2\.1\d?"):
        fusion.explain(F.silu, torch.ones(2), options={**A3, "packages": ["torch_npu==2.15"]})


@pytest.mark.skipif("CANN_FUSION_WHEELS" not in os.environ, reason="it takes the wheels of all versions")
def test_the_table_is_that_of_the_wheels():
    assert json.loads(TABLE.read_text()) == table(Path(os.environ["CANN_FUSION_WHEELS"]))
