"""Small calls of the operators of delta rules, what they mean in loops, and starts for their limits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.operators import CHIPS, HOST
from tests.operators.sparse_cases import Make

STEP = ("npu_recurrent_gated_delta_rule", "npu_recurrent_gated_delta_rule_functional")


def step(
    lengths: tuple[int, ...],
    lines: tuple[int, ...],
    *,
    accepted: tuple[int, ...] | None = None,
    heads: tuple[int, int] = (2, 4),
    decays: tuple[str, ...] = ("g",),
    wide_state: bool = True,
) -> Make:
    """Tokens of sequences of `lengths`, each with a line of the state; `heads` are those of keys and of values."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        tokens, (nk, nv), dk, dv = sum(lengths), heads, 8, 6
        unit = [torch.nn.functional.normalize(torch.randn(tokens, nk, dk, dtype=torch.float64), dim=-1) for _ in "qk"]
        wide = torch.promote_types(dtype, torch.float32)
        logs = {"g": torch.rand(tokens, nv), "gk": torch.rand(tokens, nv, dk)}
        state = torch.randn(max(lines) + 2, nv, dv, dk, dtype=torch.float64)
        call = {"query": unit[0], "key": unit[1], "value": torch.randn(tokens, nv, dv, dtype=torch.float64)}
        call["beta"] = torch.rand(tokens, nv, dtype=torch.float64)
        call = {name: each.to(dtype) for name, each in call.items()} | {
            "state": state.to(wide if wide_state else dtype)
        }
        call |= {name: (-logs[name]).to(wide) for name in decays} | {"scale": dk**-0.5}
        given = {"actual_seq_lengths": lengths, "ssm_state_indices": lines, "num_accepted_tokens": accepted}
        return call | {name: torch.tensor(each, dtype=torch.int32) for name, each in given.items() if each is not None}

    return make


CASES: tuple[tuple[str, Make], ...] = (
    ("a token of each sequence", step((1, 1, 1), (2, 0, 1))),
    ("decays of lanes", step((1, 1), (0, 1), decays=("gk",))),
    ("both decays", step((1, 1), (0, 1), decays=("g", "gk"))),
    ("without a decay", step((1, 1), (1, 0), decays=(), heads=(4, 4))),
    ("a state of 16 bits", step((1, 2), (0, 1, 2), wide_state=False)),
    ("several tokens, a line each", step((3, 1, 2), (4, 0, 2, 5, 1, 3))),
    ("accepted tokens", step((3, 1), (0, 1, 2, 3), accepted=(2, 1))),
)


def reference(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, beta: Tensor, scale: float, actual_seq_lengths: Tensor,
    ssm_state_indices: Tensor, num_accepted_tokens: Tensor | None = None, g: Tensor | None = None,
    gk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Token by token and head by head: the outputs, and the lines of the state."""
    lines, out, first = state.clone(), torch.empty_like(value), 0
    share = value.shape[1] // key.shape[1]
    for number, length in enumerate(actual_seq_lengths.tolist()):
        accepted = 0 if num_accepted_tokens is None else int(num_accepted_tokens[number]) - 1
        before = state[int(ssm_state_indices[first + accepted])]
        for head in range(value.shape[1]):
            s = before[head].double()
            for token in range(first, first + length):
                q, k = (x[token, head // share].double() for x in (query, key))
                s = s if g is None else s * g[token, head].double().exp()
                s = s if gk is None else s * gk[token, head].double().exp()
                s = s + torch.outer(beta[token, head].double() * (value[token, head].double() - s @ k), k)
                out[token, head] = (s @ q * scale).to(out.dtype)
                lines[int(ssm_state_indices[token]), head] = s.to(lines.dtype)
        first += length
    return out, lines


REFERENCES = dict.fromkeys(STEP, reference)

# a start for the search for both sides of its limits ---------------------------------------------------------------

EDGES = [(name, (HOST, *CHIPS), step((2, 1), (0, 1, 2))(torch.bfloat16), {}, "") for name in STEP]
