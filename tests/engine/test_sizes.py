"""Symbolic sizes that a rewrite needs: made from those of the inputs, wherever the graph computes them itself."""

from __future__ import annotations

import torch

import fusion

N, D, R, C, E = 4, 16, 8, 32, 16


def attended(q, latent, rope, up):
    """Attention over a latent, and the latent with its tokens in one dim: their number stands behind the scores."""
    seen = torch.ones(q.shape[-2], latent.shape[-2], dtype=torch.bool).tril()
    k, v = (latent @ up.t()).unflatten(-1, (N, D + E)).transpose(1, 2).split((D, E), dim=-1)
    nope, turned = q.split((D, R), -1)
    scores = (nope @ k.mT + turned @ rope[:, None].mT).masked_fill(~seen, -1e4)
    return scores.softmax(-1) @ v, latent.flatten(0, 1)


def test_a_number_of_tokens_that_is_computed_last_is_made_before_it_is_needed():
    shapes = (5, N, 3, D + R), (5, 3, C), (5, 3, R), (N * (D + E), C)
    inputs = [torch.randn(shape) for shape in shapes]
    inputs[3] = torch.nn.Parameter(inputs[3], requires_grad=False)
    for each in inputs[:3]:
        torch._dynamo.maybe_mark_dynamic(each, 0)
    for tensor, dim in zip(inputs[:3], (2, 1, 1), strict=True):
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    report = fusion.explain(attended, *inputs, options={"target": "host", "lower": "eager"})
    assert "latent_attention" in [each.rule for each in report.matches]
