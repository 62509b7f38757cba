"""S' = D + k (beta · (v - Dᵀ k))ᵀ with D = exp(g) · exp(gk) · S, y = scale · S'ᵀ q: a step of a gated delta rule.

*Matches* the step of one token of each sequence, with decays of heads (Gated DeltaNet) or of key lanes (KDA), and the
state as [*B, N, K, V] or [*B, N, V, K]. *Replaces with* `npu_recurrent_gated_delta_rule`, which keeps the state as
[*B, N, V, K]: other states are transposed before and after. The rule is opt-in, which states what no graph shows:

* queries, keys and beta may be rounded to bfloat16 where the model has them in float32: results, and the
  state, then differ by at most 2⁻⁷ of their largest number, over any number of tokens;
* |q|, |k| <= 1, g < 0 and 0 < beta < 1, which the page of the operator requires;
* the CANN takes a state in float32, as later ones do, where the model has such a state: it keeps its dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, scalar, tensor


@dataclass(frozen=True)
class Token(Group):
    """A token of each sequence, and the state before it, as `delta_state` names them."""

    k: Any = tensor("*K M D")
    k_eps: Any = attribute()
    v: Any = tensor("*B V")
    beta: Any = tensor("*B", optional=True)
    g: Any = tensor("*B", optional=True)
    gk: Any = tensor("*B D", optional=True)
    state: Any = tensor("*S X Y")
    values_first: Any = attribute()

    def after(self, p):
        """Build the term of the state after the token."""
        return p.delta_state(**vars(self))

    def output(self, p, query):
        """Build the term of the product of `query` with the state after the token."""
        return p.delta_rule_output(**vars(query), **vars(self))

    def rows(self, x: Tensor | None, *lanes: Any) -> Tensor | None:
        """Reshape `x` to [T, heads, *lanes]; None for None."""
        return None if x is None else x.reshape(-1, self.state.shape[-3], *lanes)


@dataclass(frozen=True)
class Query(Group):
    """A query of each sequence, and the view of the product."""

    q: Any = tensor("*K M D")
    q_eps: Any = attribute()
    scale: Any = scalar()
    view: Any = attribute()


@dataclass(frozen=True)
class DeltaRule(Rule):
    """One step of a gated delta rule: the state after a token, and its product with a query."""

    aliases = ("gated_delta_rule", "recurrent_gated_delta_rule", "kda")

    opt_in = True

    def reference(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor, scale: float):
        """Compute y [B, N, V] and the state [B, N, K, V] after a token: q, k [B, N, K], v [B, N, V], beta, g [B, N]."""
        decayed = state * g.exp()[..., None, None]
        d = beta[..., None] * (v - torch.einsum("bnk,bnkv->bnv", k, decayed))
        after = decayed + torch.einsum("bnk,bnv->bnkv", k, d)
        return scale * torch.einsum("bnk,bnkv->bnv", q, after), after

    @pattern
    def rounded(self, p, token: Any = Token, query: Any = Query):
        """y = scale · S'ᵀ q in the dtype of v, and S'"""
        return p.as_dtype(token.output(p, query), like=token.v), token.after(p)

    @pattern
    def wide(self, p, token: Any = Token, query: Any = Query):
        """y = scale · S'ᵀ q in the dtype in which it is computed, and S'"""
        return token.output(p, query), token.after(p)

    @lowering
    def run(self, token: Token, query: Query):
        """Emit npu_recurrent_gated_delta_rule on a copy of the state, which it may write in place."""
        return _emitted(token, query)

    @lowering
    def widened(self, token: Token, query: Query):
        """Emit npu_recurrent_gated_delta_rule, and cast its result to float32."""
        y, after = _emitted(token, query)
        return y.to(torch.float32), after


def _emitted(token: Token, query: Query) -> tuple[Tensor, Tensor]:
    heads, stored = token.state.shape[-3], token.v.dtype
    state = token.state if token.values_first else token.state.mT
    values, lanes = state.shape[-2:]
    state = state.reshape(-1, heads, values, lanes).contiguous()
    q, k = (_unit(x, eps).to(stored) for x, eps in ((query.q, query.q_eps), (token.k, token.k_eps)))
    v = token.v.reshape(-1, heads, values)
    beta = v.new_ones(v.shape[:2]) if token.beta is None else token.beta.to(stored).reshape(-1, heads)
    g, gk = (None if x is None else x.to(torch.float32) for x in (token.g, token.gk))
    lines = torch.arange(v.shape[0], dtype=torch.int32, device=v.device)
    vectors = (x.reshape(-1, *x.shape[-2:]) for x in (q, k))
    y, after = torch.ops.npu.npu_recurrent_gated_delta_rule_functional(
        *vectors, v, state, beta=beta, scale=query.scale, actual_seq_lengths=torch.ones_like(lines),
        ssm_state_indices=lines, g=token.rows(g), gk=token.rows(gk, lanes),
    )  # fmt: skip
    after = after if token.values_first else after.mT
    return y.reshape(query.view), after.reshape(token.state.shape)


def _unit(x: Tensor, eps: float | None) -> Tensor:
    """Compute x / sqrt(sum(x²) + eps) of `x` [.., D] by npu_rms_norm; `x` itself without an eps."""
    if eps is None:
        return x
    size = x.shape[-1]
    gain = torch.full((size,), size**-0.5, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    return torch.ops.npu.npu_rms_norm(x, gain, eps / size)[0]
