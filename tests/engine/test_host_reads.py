"""Lengths as numbers: one copy to the host where the user allows it, else a mask; never a wait that nobody sees."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.errors import OperatorError
from fusion.operators import OPERATORS
from fusion.operators.registration import ensure, run_with_ints

LENGTHS = "npu::npu_fused_infer_attention_score_v2.tensor_lengths"
NPU = {"target": "ascend910_93", "lower": "eager"}


def step(q: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> Tensor:
    """Two layers of one token over a cache of which each sequence has filled its own part."""
    mask = (torch.arange(keys.shape[-2]) < length[:, None])[:, None, None]
    for k, v in zip(keys, values, strict=True):
        q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return q


def inputs() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    shapes = ((3, 4, 1, 128), (2, 3, 2, 16, 128), (2, 3, 2, 16, 128))
    q, keys, values = (torch.randn(shape, generator=g).bfloat16() for shape in shapes)
    return q, keys, values, torch.tensor([5, 16, 9])


def explained(**options) -> tuple[fusion.Report, list[str]]:
    torch.compiler.reset()
    report = fusion.explain(step, *inputs(), options={**NPU, **options})
    return report, [str(node.target) for node in report.graphs[0].graph.nodes]


@pytest.mark.parametrize("plan_lower", ["eager", "inductor"])
def test_both_layers_read_lengths_that_were_copied_once(plan_lower):
    report, called = explained(plan_lower=plan_lower, lengths="host")
    assert [name for name in called if "fused_infer" in name] == [LENGTHS.replace("::", ".")] * 2
    assert called.count("aten._to_copy.default") == 1
    assert "each step waits once for the device" in " ".join(str(report).split())


@pytest.mark.parametrize(
    "options",
    [dict(plan_lower="eager"), dict(plan_lower="npugraph_ex"), dict(plan_lower="npugraph_ex", lengths="host")],
)
def test_nothing_waits_unless_it_is_allowed_and_lasts(options):
    report, called = explained(**options)
    assert not any("tensor_lengths" in name or "_to_copy" in name for name in called)
    assert sum("fused_infer" in name for name in called) == 2
    assert "waits" not in str(report)


def test_torchair_takes_lengths_where_they_are():
    report, called = explained(lengths="host")
    assert sum("tensor_lengths" in name for name in called) == 2
    assert "aten._to_copy.default" not in called
    assert "waits" not in str(report)


def test_numbers_are_eager_numbers():
    torch.compiler.reset()
    run = torch.compile(step, backend="cann_fusion", options={**NPU, "plan_lower": "eager", "lengths": "host"})
    with torch.no_grad():
        for length in (torch.tensor([5, 16, 9]), torch.tensor([6, 1, 10])):
            given = (*inputs()[:3], length)
            torch.testing.assert_close(run(*given), step(*given), rtol=2e-2, atol=2e-2)


def test_the_vendors_overload_is_given_numbers():
    ensure()
    q, keys, values, lengths = inputs()
    args = (q, keys[0], values[0])
    how = dict(num_query_heads=4, num_key_value_heads=2, input_layout="BNSD", softmax_scale=0.1)
    have = run_with_ints(OPERATORS[LENGTHS], *args, actual_seq_kvlen=lengths, **how)
    want = torch.ops.npu.npu_fused_infer_attention_score_v2(*args, actual_seq_kvlen=lengths.tolist(), **how)
    torch.testing.assert_close(have[0], want[0])


def test_lengths_that_lie_on_the_device_are_refused():
    ensure()
    q, keys, values, lengths = (each.to("meta") for each in inputs())
    with pytest.raises(OperatorError, match=r"on meta: to read it there would wait.*lengths='host'"):
        run_with_ints(OPERATORS[LENGTHS], q, keys[0], values[0], actual_seq_kvlen=lengths)
