"""Gated delta rule over packed tokens, with a state S [Dv, Dk] of each sequence and head (Yang, Gated Delta Networks).

S ← S · exp(g) · exp(gk);  d = beta · (v - S k);  S ← S + d kᵀ;  out = S (scale · q)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion._torch.tensors import count
from fusion.operators.cache.pages import Put
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import BFLOAT16, FLOAT32, INT32, compute_dtype
from fusion.operators.flops import scores
from fusion.operators.limits import CHIPS, Limit
from fusion.operators.operator import Operator, functional

_MOST_TOKENS = 8
"""Most tokens of one sequence in a call: the kernel returns silently above, with stale results."""


@dataclass(frozen=True)
class _Step:
    """The next token of each of B sequences.

    Attributes:
        token: its number [B] among all tokens; the last one of the sequence where no token is left.
        is_left: mask [B] of the sequences with such a token.
    """

    token: Tensor
    is_left: Tensor


def _recurrent(put: Put, given: Given) -> tuple[Tensor, Tensor]:
    """Compute the outputs [T, Nv, Dv], and write the state after each token to its line by `put`."""
    value, state, lines = given["value"], given["state"], given["ssm_state_indices"].long()
    wide = torch.promote_types(compute_dtype(value), compute_dtype(state))
    out = value.new_zeros(value.shape, dtype=wide)
    s = state.index_select(0, lines[_first_lines(given)]).to(wide)
    for step in _steps(given):
        s, y = _advanced(given, step, s)
        out = out.index_put([step.token], y.where(step.is_left[:, None, None], out[step.token]))
        # Where no token is left, this writes once more what was written for the last one.
        state = put(state, [lines[step.token]], s.to(state.dtype))
    return out.to(value.dtype), state


def _first_lines(given: Given) -> Tensor:
    """Return the token [B] of whose line each sequence takes its state: its first, or its last accepted one."""
    lengths = given["actual_seq_lengths"].long()
    first = lengths.cumsum(0) - lengths
    accepted = given["num_accepted_tokens"]
    return first if accepted is None else first + accepted.long() - 1


def _steps(given: Given) -> Iterator[_Step]:
    """Yield the steps that the longest of the sequences may take."""
    lengths = given["actual_seq_lengths"].long()
    last = lengths.cumsum(0) - 1
    most = given["value"].shape[0] - lengths.shape[0] + 1
    for number in range(min(most, _MOST_TOKENS)):
        token = last - lengths + 1 + number
        yield _Step(torch.minimum(token, last), token <= last)


def _advanced(given: Given, step: _Step, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states `s` [B, Nv, Dv, Dk] after `step`, unchanged where no token is left, and the outputs [B, Nv,
    Dv].
    """
    heads = given["value"].shape[1]

    def taken(name: str) -> Tensor:
        rows = given[name].index_select(0, step.token).to(s.dtype)
        return rows.repeat_interleave(heads // rows.shape[1], 1) if rows.shape[1] != heads else rows

    q, k, v, beta = (taken(name) for name in ("query", "key", "value", "beta"))
    decayed = s
    if given["g"] is not None:
        decayed = decayed * taken("g").exp()[..., None, None]
    if given["gk"] is not None:
        decayed = decayed * taken("gk").exp()[..., None, :]
    d = beta[..., None] * (v - (decayed * k[..., None, :]).sum(-1))
    after = decayed + d[..., None] * k[..., None, :]
    y = (after * (q * given["scale"])[..., None, :]).sum(-1)
    return after.where(step.is_left[:, None, None, None], s), y


def _flops(given: Given) -> float:
    """Estimate the operations of four passes over the state of each token and head."""
    return scores(2 * count(given["value"]), given["key"].shape[-1])


_REQUIRED = "aclnn requires it, although the schema does not"
_HOST = (
    *(Limit(f"given({name})", because=_REQUIRED) for name in ("beta", "actual_seq_lengths", "ssm_state_indices")),
    Limit("given(scale)", because="op-plugin raises without it"),
    Limit("Nv % Nk == 0", because="as many heads of values share each head of keys"),
    Limit(f"T <= {_MOST_TOKENS} * B", because="the kernel takes no longer sequences, and returns silently"),
    Limit("Lines >= T", because="each token has a line of the state"),
)
_KERNEL = ("Nv <= 256", "Dk <= 512", "Dv <= 512")

RECURRENT_GATED_DELTA_RULE = Operator(
    schema=(
        "npu::npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, "
        "Tensor? beta=None, float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, "
        "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor"
    ),
    compute=_recurrent,
    outputs=lambda value: value.new_empty(value.shape),
    dims={
        "value": "T Nv Dv",
        "query key": "T Nk Dk",
        "state": "Lines Nv Dv Dk",
        "beta g": "T Nv",
        "gk": "T Nv Dk",
        "ssm_state_indices": "T",
        "actual_seq_lengths num_accepted_tokens": "B",
    },
    dtypes={
        "query key value beta": BFLOAT16,
        "state": BFLOAT16 | FLOAT32,
        "g gk": FLOAT32,
        "actual_seq_lengths ssm_state_indices num_accepted_tokens": INT32,
    },
    limits={"host": _HOST, **dict.fromkeys(CHIPS, _KERNEL)},
    lowerings=frozenset({"eager", "torchair", "npugraph_ex"}),
    flops=_flops,
    source=(
        "op-plugin: torch_npu.npu_recurrent_gated_delta_rule and its test (state in bfloat16, A2 and A3); CANN: "
        "aclnnRecurrentGatedDeltaRule (a later page: state in float32 too, 950 too); kernel: vllm-ascend csrc"
    ),
    summary=(
        "for each token S = S · exp(g) · exp(gk), S += beta (v - S k) kᵀ, out = round(S (scale · q)), in float32; a "
        "sequence begins with the state in the line of its first token, or of its last accepted one, and the state "
        "after each token is written to its line; heads of values share heads of keys; |q|, |k| <= 1, g < 0 and "
        "0 < beta < 1 are asked of the caller"
    ),
)
RECURRENT_GATED_DELTA_RULE_FUNCTIONAL = functional(
    RECURRENT_GATED_DELTA_RULE,
    "npu::npu_recurrent_gated_delta_rule_functional",
    "npu_recurrent_gated_delta_rule, which writes to a copy of the state and returns the copy",
    lowerings=frozenset({"torchair"}),
)
