"""What stands before latent attention over pages, with layers in whole numbers of 8 bits, as serving code writes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusion import Example
from patterns.examples import mla_prolog_paged as paged
from patterns.examples.inputs import Inputs
from patterns.examples.mla_prolog import DR, C, N, norm, rope_last, turned
from patterns.examples.mla_prolog_quantised import multiplied, whole
from patterns.examples.quantisation import quantised

Project = Callable[..., tuple[Tensor, Tensor]]


def inputs(plain: Inputs, *layers: str) -> Inputs:
    """As in floats, with these of the layers dq, uq, dkv in whole numbers, their scales behind everything else."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, dq, uq, dkv, *rest = plain(dtype)
        given = {"dq": dq, "uq": uq, "dkv": dkv}
        made = {name: whole(20 + 2 * n, *given[name].shape) for n, name in enumerate(layers)}
        kept = [made[name][0] if name in made else each for name, each in given.items()]
        fixed, more = (
            [torch.nn.Parameter(each, requires_grad=False) for each in some]
            for some in (kept, [scale for _, scale in made.values()])
        )
        return x, *fixed, *rest, *more

    return make


def heads_alone(x: Tensor, dq: Tensor, uq: Tensor, dkv: Tensor, gain: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Heads of the queries, whose layer is quantised, and lines."""
    return multiplied(quantised(norm(linear(x, dq), gain)), uq, scale, x.dtype), linear(x, dkv)


def all_layers(
    x: Tensor, dq: Tensor, uq: Tensor, dkv: Tensor, gain: Tensor, dq_scale: Tensor, uq_scale: Tensor, dkv_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, all three layers quantised."""
    rows = quantised(x)
    latent = norm(multiplied(rows, dq, dq_scale, x.dtype), gain)
    return multiplied(quantised(latent), uq, uq_scale, x.dtype), multiplied(rows, dkv, dkv_scale, x.dtype)


def model(project: Project, write: paged.Write = paged.viewed, read: paged.Read = paged.whole) -> Callable[..., Tensor]:
    """A function that writes the rows of some tokens, which may be packed, and attends to the pages."""

    def forward(
        x: Tensor, dq: Tensor, uq: Tensor, dkv: Tensor, gain_q: Tensor, gain_kv: Tensor, ukv: Tensor, cos: Tensor,
        sin: Tensor, latents: Tensor, ropes: Tensor, table: Tensor, lengths: Tensor, slots: Tensor, *scales: Tensor,
    ) -> Tensor:  # fmt: skip
        heads, line = project(x, dq, uq, dkv, gain_q, *scales)
        q = rope_last(heads.view(*x.shape[:-1], N, -1), cos.unsqueeze(-2), sin.unsqueeze(-2))
        q = q.transpose(1, 2) if x.dim() == 3 else q.unsqueeze(2)
        latent, rope = line.split((C, DR), dim=-1)
        for pages, rows in ((latents, norm(latent, gain_kv)), (ropes, turned(rope, cos, sin))):
            write(pages, rows.reshape(-1, rows.shape[-1]), slots)
        latent, rope = (read(pages, table) for pages in (latents, ropes))
        return paged.attended(q, latent, rope, ukv, lengths)

    return forward


ALL = ("dq", "uq", "dkv")
EXAMPLES = (
    Example("a token, the heads quantised", model(heads_alone), inputs(paged.inputs(1), "uq")),
    Example("two tokens, all quantised", model(all_layers, paged.by_block), inputs(paged.inputs(2), *ALL)),
    Example("lines of NZ", model(all_layers, paged.in_lines, paged.of_lines), inputs(paged.lines(1), *ALL)),
    Example("packed tokens, the heads quantised", model(heads_alone), inputs(paged.packed, "uq")),
    Example("packed tokens, all quantised", model(all_layers), inputs(paged.packed, *ALL)),
)
REJECTS = (
    Example(
        "two at a slot",
        model(all_layers, paged.two_in_a_row),
        inputs(paged.inputs(2, heads=(2,)), *ALL),
        "hold several",
    ),
    Example(
        "unknown places", model(heads_alone, paged.anywhere), inputs(paged.inputs(1), "uq"), "not proven to lie in"
    ),
)
