"""A latent cache in whole numbers: the prolog writes it in lines of NZ, one attention reads it, as exact as plain."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fusion
from tests.examples import latent_attention_int8 as int8
from tests.examples import mla_prolog_int8 as prolog
from tests.support.fused import call, calls

pytestmark = pytest.mark.rotates(8)

EXAMPLES = Path(__file__).parents[2] / "examples"
OPERATORS = {
    "npu::npu_add_rms_norm_dynamic_quant", "npu::npu_mla_prolog_v3", "npu::npu_fused_infer_attention_score_v2",
    "npu::npu_dynamic_quant", "npu::npu_quant_matmul",
    "npu::npu_transpose_batchmatmul",
}  # fmt: skip


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("deepseek_r1_w8a8c8")


def blocks(example: ModuleType, *dtypes: torch.dtype) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    state = example.converted(example.Attention().state_dict(), torch.bfloat16, example.Attention).state_dict()
    return [example.converted(state, dtype, example.Attention) for dtype in dtypes]


@pytest.mark.rotates(6)
def test_a_token_becomes_six_operators_that_pass_whole_numbers_on(example: ModuleType):
    (block,) = blocks(example, torch.bfloat16)
    with torch.no_grad():
        report = fusion.explain(block, *example.step(example.PROMPT, 1, torch.bfloat16), options=example.OPTIONS)
    assert set(report.ops) == OPERATORS
    told = call(report, "mla_prolog").kwargs
    modes = [told[f"{name}_quant_mode"] for name in ("weight", "kv_cache", "query")]
    assert (modes, told["cache_mode"]) == ([2, 1, 1], "PA_NZ")
    attention = call(report, "infer_attention")
    assert attention.kwargs["query_quant_mode"] == 3
    sources = [attention.args[0], attention.kwargs["query_rope"], attention.kwargs["dequant_scale_query"]]
    for each in sources:
        while len(each.all_input_nodes) == 1 and "mla_prolog" not in str(each.target):
            (each,) = each.all_input_nodes
        assert "mla_prolog" in str(each.target), "queries go from one operator to the other as they are"


@pytest.mark.rotates
def test_prompt_and_tokens_are_as_exact_as_plain_ones_and_so_are_the_caches(example: ModuleType):
    dtypes = (torch.float64, torch.bfloat16, torch.bfloat16)
    exact, plain, fused = blocks(example, *dtypes)
    compiled = torch.compile(fused, backend="cann_fusion", options=example.OPTIONS, dynamic=False)
    runs = zip((exact, plain, compiled), dtypes, strict=True)
    truth, before, after = (example.run(block, dtype) for block, dtype in runs)
    for number, want in enumerate(truth):
        assert example.error(after[number], want) <= 1.5 * example.error(before[number], want)
    for name in ("latents", "ropes"):
        want, old, new = (getattr(block, name).double() for block in (exact, plain, fused))
        assert example.error(new, want) <= 1.5 * example.error(old, want)
        assert want.any()


def test_a_chip_refuses_pages_that_are_not_in_lines():
    form = int8.in_pages(int8.explicit)
    inputs = int8.inputs(1, int8.PAGES, int8.LENGTHS)(torch.bfloat16)
    options = {"target": "ascend910_93", "plan_lower": "torchair"}
    report = fusion.explain(form, *inputs, options=options)
    assert "npu::npu_fused_infer_attention_score_v2" not in report.ops
    reasons = [each.reason for each in report.refusals if each.rule == "latent_attention"]
    assert reasons
    assert all("npu_fused_infer_attention_score_v2" in each for each in reasons)


def behind(q, rope, latent, k_rope, seen, scale):
    """Rotated queries divided before, everything multiplied behind."""
    numbers, tokens = int8.quantised(q)
    turned = rope.float() / (tokens * scale)
    scores = torch.einsum("bnsc,btc->bnst", numbers.float(), latent.float())
    scores = (scores + torch.einsum("bnsr,btr->bnst", turned, k_rope.float())) * tokens * scale * int8.SCALE
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (torch.einsum("bnst,btc->bnsc", shares, latent.float()) * scale).to(q.dtype)


def halves(q, rope, latent, k_rope, seen, scale):
    """All of it in the dtype of the model, heads behind positions, by matmul."""
    largest = q.float().abs().amax(-1, keepdim=True).clamp(min=1e-5)
    numbers = torch.round(q.float() * (127 / largest)).clamp(-128, 127).char()
    query, keys = numbers.to(q.dtype) * (largest / 127).to(q.dtype), latent.to(q.dtype).mul(scale.to(q.dtype))
    scores = torch.matmul(query, keys[:, None].transpose(2, 3)) + rope @ k_rope[:, None].transpose(2, 3)
    scores = torch.where(seen, scores.float() / 8, torch.finfo(torch.float32).min)
    return scores.softmax(dim=-1).to(q.dtype) @ keys[:, None]


def weights_after(q, rope, latent, k_rope, seen, scale):
    """The scale of the latent joined with that of the softmax, and left for last behind the values."""
    numbers, tokens = int8.quantised(q)
    both = int8.SCALE * tokens * scale
    scores = (numbers.float() @ latent.float()[:, None].mT) * both
    scores = scores + int8.SCALE * (rope.float() @ k_rope.float()[:, None].mT)
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (scale * (shares @ latent.float()[:, None])).to(q.dtype)


SPELLINGS = (int8.explicit, int8.restored, int8.by_sdpa, int8.in_the_dtype, behind, halves, weights_after)


@pytest.mark.parametrize("lay", [int8.in_nz, int8.in_pages], ids=["lines", "pages"])
@pytest.mark.parametrize("attend", SPELLINGS, ids=lambda each: each.__name__)
def test_every_spelling_becomes_one_attention_over_whole_numbers(attend, lay):
    shape = int8.NZ if lay is int8.in_nz else int8.PAGES
    inputs = int8.inputs(1, shape, int8.LENGTHS)
    function = lay(attend)
    report = fusion.explain(function, *inputs(torch.bfloat16), options={"target": "host", "lower": "eager"})
    assert report.ops["npu::npu_fused_infer_attention_score_v2"] == 1
    torch.compiler.reset()
    compiled = torch.compile(function, backend="cann_fusion", options={"target": "host", "lower": "eager"})
    with torch.no_grad():
        plain, fused = function(*inputs(torch.float32)), compiled(*inputs(torch.float32))
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


def by_channel(q, rope, latent, k_rope, seen, scale):
    """A scale of each channel of the latent."""
    return int8.restored(q, rope, latent, k_rope, seen, scale * torch.arange(1, latent.shape[-1] + 1))


def shifted(q, rope, latent, k_rope, seen, scale):
    """A latent with a zero point."""
    numbers, tokens = int8.quantised(q)
    keys = (latent.float() + 3) * scale
    scores = (numbers.float() * tokens) @ keys[:, None].mT + rope.float() @ k_rope.float()[:, None].mT
    return ((scores * int8.SCALE).masked_fill(~seen, -torch.inf).softmax(-1) @ keys[:, None]).to(q.dtype)


def apart(q, rope, latent, k_rope, seen, scale):
    """Other rows as values than as keys."""
    numbers, tokens = int8.quantised(q)
    scores = (numbers.float() * tokens) @ (latent.float() * scale)[:, None].mT
    scores = scores + rope.float() @ k_rope.float()[:, None].mT
    shares = (scores * int8.SCALE).masked_fill(~seen, -torch.inf).softmax(-1)
    return (shares @ (latent.flip(1).float() * scale)[:, None]).to(q.dtype)


@pytest.mark.parametrize("attend", [int8.floats_alone, int8.by_token, int8.shared, by_channel, shifted, apart])
def test_what_only_looks_like_it_is_refused(attend):
    inputs = int8.inputs(1, int8.NZ, int8.LENGTHS)(torch.bfloat16)
    report = fusion.explain(int8.in_nz(attend), *inputs, options={"target": "host", "lower": "eager"})
    assert not any(node.kwargs.get("query_quant_mode") == 3 for node in calls(report, "infer_attention"))
    assert report.refusals


def multiplied(latent, scale):
    """Times the inverse, with methods."""
    return latent.float().mul(scale.reciprocal()).round().clip(-128, 127).to(torch.int8)


def with_functions(latent, scale):
    """Functions alone."""
    return torch.clamp(torch.round(torch.div(latent.float(), scale)), -128, 127).char()


STORES = (prolog.by_inverse, prolog.bounded_first, multiplied, with_functions)


@pytest.mark.parametrize("store", STORES, ids=lambda each: each.__name__)
def test_every_way_to_quantise_what_is_written_becomes_the_prolog(store):
    example = prolog.by_tensor_in("a store", prolog.TENSOR_NZ, quantise=store)
    report = fusion.explain(
        example.function, *example.inputs(torch.bfloat16), options={"target": "host", "lower": "eager"}
    )
    assert report.ops["npu::npu_mla_prolog_v3"] == 1
    told = call(report, "mla_prolog").kwargs
    assert (told["kv_cache_quant_mode"], told["query_quant_mode"]) == (1, 1)


def cut_off(latent, scale):
    """Toward zero."""
    return (latent.float() / scale).clamp(-128, 127).to(torch.int8)


def unbounded(latent, scale):
    """What is beyond int8 wraps."""
    return (latent.float() / scale).round().to(torch.int8)


def with_zero_point(latent, scale):
    """Asymmetric."""
    return ((latent.float() / scale).round() + 3).clamp(-128, 127).to(torch.int8)


def of_channels(latent, scale):
    """A scale of each channel."""
    return (latent.float() / (scale * torch.arange(1, latent.shape[-1] + 1))).round().clamp(-128, 127).to(torch.int8)


@pytest.mark.parametrize("store", [cut_off, unbounded, with_zero_point, of_channels, prolog.narrow])
def test_what_is_written_otherwise_is_left_to_the_model(store):
    example = prolog.by_tensor_in("a store", prolog.TENSOR_NZ, quantise=store)
    report = fusion.explain(
        example.function, *example.inputs(torch.bfloat16), options={"target": "host", "lower": "eager"}
    )
    assert not any(node.kwargs.get("kv_cache_quant_mode") for node in calls(report, "mla_prolog"))
    assert report.ops["npu::npu_fused_infer_attention_score_v2"] == 1, "what reads the cache is fused all the same"
