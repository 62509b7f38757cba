"""Attention of an encoder whose heads lie last reaches GE IR through the vendor's own compiler."""

from __future__ import annotations

import pytest

from tests.support.torch_npu_host import answer, requires_torch_npu

CHILD = """
import json, torch
from tests.support import ge
ge.install()

def encoder(x, *weights):
    heads = (2, 33, 4, 72)  # lanes that attention for inference does not take
    q, k, v = ((x @ weight).view(heads).transpose(1, 2) for weight in weights)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

generator = torch.Generator().manual_seed(0)
given = [torch.randn(*size, generator=generator) for size in ((2, 33, 288), *[(288, 288)] * 3)]
given = [given[0].half(), *((each / 17).half() for each in given[1:])]
compiled = torch.compile(encoder, backend="cann_fusion", options=dict(target="ascend910b", lower="torchair"))
exact = encoder(*(each.double() for each in given))
errors = [(call(*given) - exact).abs().max().item() for call in (encoder, compiled)]
print(json.dumps(dict(operators=ge.operators(), errors=errors)))
"""


@requires_torch_npu
@pytest.mark.rotates(12)
def test_heads_that_lie_last_are_handed_on_joined():
    told = answer(CHILD)
    assert told["operators"]["FlashAttentionScore"] == 1, told["operators"]
    assert not {"Transpose", "SoftmaxV2"} & set(told["operators"])
    plain, fused = told["errors"]
    assert fused <= 1.5 * plain
