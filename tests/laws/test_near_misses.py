"""Places that almost fuse: the reason names the obstacle, and without the obstacle the same place fuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.options import Options
from fusion.testing import Trial, capture, trial_of
from tests.engine.graphs import names, numbers

B, N, S, D = 2, 4, 64, 64
OPTIONS = Options(target="ascend910_93", lower="eager", plan_cache="off")
ATTENTION = "npu.npu_fused_infer_attention_score_v2"
Piece = Callable[..., Any]


def heads() -> tuple[Tensor, ...]:
    return tuple(numbers(B, N, S, D, seed=seed).bfloat16() for seed in range(3))


def rows() -> tuple[Tensor, ...]:
    return (numbers(24, 256).bfloat16(),)


def logits() -> tuple[Tensor, ...]:
    return numbers(24, 32), numbers(32, seed=1)


def weights(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * D**-0.5).softmax(-1)


def factor_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (weights(q, k) * torch.linspace(0.5, 1, S, dtype=q.dtype)) @ v


def on_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(q, k) @ (v * torch.linspace(0.5, 1, S, dtype=q.dtype)[:, None])


def factor_of_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (weights(q, k) * q[..., :1].exp()) @ v


def on_the_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (weights(q, k) @ v) * q[..., :1].exp()


def factor_of_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (weights(q, k) * torch.linspace(0.5, 1, S * S, dtype=q.dtype).view(S, S)) @ v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(q, k) @ v


def distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (-torch.cdist(q.float(), k.float())).softmax(-1).to(v.dtype) @ v


def sums_of_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pairs = torch.tanh(q[:, :, :, None, :8] + k[:, :, None, :, :8])
    return pairs.sum(-1).softmax(-1) @ v


def gated(activation: Callable[[Tensor], Tensor]) -> Piece:
    def piece(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate) * up

    return piece


def quantised(rounded: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.int8, zero: int = 0) -> Piece:
    def piece(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return (rounded(x.float() / scale) + zero).clamp(least, most).to(dtype), scale

    return piece


def routed(scores: Callable[[Tensor], Tensor], choice: Callable[[Tensor, Tensor], Tensor]) -> Piece:
    def piece(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        given = scores(x)
        experts = choice(given, bias).topk(4, -1)[1]
        chosen = given.gather(-1, experts)
        return chosen / chosen.sum(-1, keepdim=True), experts

    return piece


def scaled_behind(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    values, experts = x.topk(4, -1)
    return (values * 2).softmax(-1), experts


def scaled_before(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    values, experts = (x * 2).topk(4, -1)
    return values.softmax(-1), experts


def rectified(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    values, experts = x.relu().topk(4, -1)
    return values / values.sum(-1, keepdim=True), experts


def of_sigmoids(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    values, experts = x.sigmoid().topk(4, -1)
    return values / values.sum(-1, keepdim=True), experts


def over_squares(x: Tensor) -> Tensor:
    squares = x.float().square()
    return squares / (squares.mean(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True)
class NearMiss:
    """A `piece` with one obstacle, which the reason names by `text`, and `cured` without it, which has the `op`."""

    piece: Piece
    text: str
    cured: Piece
    op: str
    inputs: Callable[[], tuple[Tensor, ...]] = heads


QUANT, GATING = "npu.npu_dynamic_quant", "npu.npu_moe_gating_top_k"
NEAREST, SWIGLU = quantised(torch.round), "npu.npu_swiglu"
SIGMOIDS = routed(torch.sigmoid, Tensor.add)
NEAR: dict[str, NearMiss] = {
    "a factor of keys": NearMiss(factor_of_keys, "; multiply the values by it, or", on_values, ATTENTION),
    "a factor of queries": NearMiss(factor_of_queries, "; multiply the product by it, or", on_the_product, ATTENTION),
    "a factor of pairs": NearMiss(factor_of_pairs, "softmax(scores) @ values; leave it out", attention, ATTENTION),
    "distances": NearMiss(distances, "from pairs of queries and keys by cdist", attention, ATTENTION),
    "sums of pairs": NearMiss(sums_of_pairs, "from pairs of queries and keys by an addition", attention, ATTENTION),
    "relu": NearMiss(gated(torch.relu), "its activation is relu", gated(F.silu), SWIGLU, rows),
    "tanh": NearMiss(gated(torch.tanh), "its activation is tanh", gated(F.silu), SWIGLU, rows),
    "floor": NearMiss(quantised(torch.floor), "rounded by floor", NEAREST, QUANT, rows),
    "ceil": NearMiss(quantised(torch.ceil), "rounded by ceil", NEAREST, QUANT, rows),
    "uint8": NearMiss(quantised(torch.round, torch.uint8, 128), "and cast to uint8", NEAREST, QUANT, rows),
    "int16": NearMiss(quantised(torch.round, torch.int16), "and cast to int16", NEAREST, QUANT, rows),
    "scaled behind": NearMiss(scaled_behind, "multiplied by 2.0 behind", scaled_before, f"{GATING}_softmax_v2", logits),
    "rectified": NearMiss(rectified, "something else than sigmoid or softmax", of_sigmoids, GATING, logits),
    "a factor of experts": NearMiss(
        routed(torch.sigmoid, Tensor.mul), "something else than sigmoid or softmax", SIGMOIDS, GATING, logits
    ),
}


def tried(piece: Piece, inputs: tuple[Tensor, ...]) -> Trial:
    return trial_of(capture(piece, inputs), OPTIONS)


@pytest.mark.parametrize("near", NEAR.values(), ids=NEAR)
def test_a_place_that_almost_fuses_fuses_without_what_the_reason_names(near: NearMiss):
    missed, cured = (tried(each, near.inputs()) for each in (near.piece, near.cured))
    assert any(near.text in str(each.reason) for each in missed.outcome.refusals), missed.outcome.refusals
    assert not any(each.startswith(f"{near.op}.") for each in names(missed.fused))
    assert any(each.startswith(f"{near.op}.") for each in names(cured.fused))


def test_squares_over_their_mean_are_no_norm_without_a_root():
    refusals = tried(over_squares, rows()).outcome.refusals
    assert not any("there is none under the root" in str(each.reason) for each in refusals)
