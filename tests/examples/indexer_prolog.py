"""What stands before an indexer in int8 over pages as plain code, and what differs from what one operator does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from fusion import Example
from tests.examples.caches import BLOCKS, SIZE, anywhere, in_nz, viewed
from tests.examples.inputs import fixed, in_dtype, normal, tables
from tests.examples.latent_model import times
from tests.examples.quantisation import int8_layer, product, quantised, weights
from tests.examples.sparse_attention_pto import Tables, first_lanes, in_halves

Rows = tuple[Tensor, Tensor]


def hadamard(width: int) -> Tensor:
    """Float64 [width, width], whose entries are 1 and -1."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


@dataclass(frozen=True)
class Setting:
    """Sizes, and the slots of tokens; with so many `sequences`, tokens are [B, S, H]."""

    slots: tuple[int, ...] = (5, 3, 17, 30)
    sequences: int = 0
    he: int = 32
    hcq: int = 24
    n: int = 4
    d: int = 16
    dr: int = 8
    size: int = SIZE
    pages: int = BLOCKS
    made: Callable[..., Tensor] = normal

    def __call__(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Fresh inputs: hidden states, tables, slots, the latent with its scales, both caches, the weights."""
        tokens = (self.sequences, len(self.slots) // self.sequences) if self.sequences else (len(self.slots),)
        latent = weights(3, *tokens, self.hcq)
        scale = (torch.rand(*tokens, 1, generator=torch.Generator().manual_seed(4)) + 0.5) / 64
        caches = weights(5, self.pages, self.size, self.d), torch.ones(self.pages, self.size, 1, dtype=torch.float16)
        layers = (self.made(7, self.d, self.he), self.made(8, self.n, self.he))
        turn = hadamard(self.d) * self.d**-0.5
        held = (*int8_layer(6, self.n * self.d, self.hcq), *(each * self.he**-0.5 for each in layers), turn)
        gains = 1 + self.made(9, self.d) / 8, self.made(10, self.d) / 8
        x, angles = self.made(11, *tokens, self.he), tables(12, *tokens, self.dr)
        given = (x, *angles, torch.tensor(self.slots), latent, scale, *caches, *map(fixed, (*held, *gains)))
        return tuple(in_dtype(each, dtype) for each in given)


SETTING = Setting()


def in_lines(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same with NZ pages [Block, D, Size, 1] of both."""
    *given, keys, scales = (parts := SETTING(dtype))[:8]
    return *given, *(each.transpose(1, 2).unsqueeze(-1).contiguous() for each in (keys, scales)), *parts[8:]


def of_bfloat16(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same, without float16: in it, what is rounded to float16 once more is as it was."""
    return SETTING(torch.bfloat16 if dtype == torch.float16 else dtype)


def of_one_head(x: Tensor, of: Tables) -> Tensor:
    """The first lanes of rows that have a dim for their head."""
    cos, sin = of
    return first_lanes(x.unsqueeze(-2), (cos.unsqueeze(-2), sin.unsqueeze(-2))).squeeze(-2)


def by_head(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Weights of heads times a number, in float16."""
    return (linear(x, weight) * scale).half()


def in_their_own(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """The same in the dtype of the model."""
    return linear(x, weight) * scale


def as_they_are(x: Tensor) -> Tensor:
    """Rows as they are."""
    return x


@dataclass(frozen=True)
class Model:
    """Queries, their scales and head weights; its parts in other ways are look-alikes."""

    setting: Setting = SETTING
    eps: float = 1e-6
    factor: float | None = None
    turned: float = 1.0
    turned_keys: float = 1.0
    rotate: Callable[[Tensor, Tables], Tensor] = first_lanes
    rotate_keys: Callable[[Tensor, Tables], Tensor] = first_lanes
    of_heads: Callable[[Tensor, Tensor, float], Tensor] = by_head
    before: Callable[[Tensor], Tensor] = as_they_are
    kept: Callable[[Tensor], Tensor] = Tensor.half
    write: Callable[[Tensor, Tensor, Tensor], Any] = viewed

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Queries [.., N, D] in int8, scales [.., N, 1], weights [.., N]."""
        x, cos, sin, slots, latent, tokens, keys, scales, iq, of_iq, ik, iw, turn, gain, beta = tensors
        s = self.setting
        key = layer_norm(linear(x, ik), (s.d,), gain, beta, self.eps)
        layer = (product(latent, iq).float() * tokens * of_iq).to(x.dtype)
        query = self.rotate(layer.unflatten(-1, (s.n, s.d)), (cos.unsqueeze(-2), sin.unsqueeze(-2)))
        query, query_scale = self._quantised(times(query @ turn, self.turned))
        key, key_scale = self._quantised(times(self.rotate_keys(key, (cos, sin)) @ turn, self.turned_keys))
        for cache, rows in ((keys, key), (scales, key_scale.half())):
            self.write(cache, rows.reshape(-1, rows.shape[-1]), slots)
        factor = (s.n * s.d) ** -0.5 if self.factor is None else self.factor
        return query, self.kept(query_scale), self.of_heads(x, iw, factor)

    def _quantised(self, x: Tensor) -> Rows:
        """Rows in int8, and their scales."""
        return quantised(self.before(x))


PART = "their scales are not float16"


def example(name: str, refusal: str = "", setting: Setting = SETTING, **parts: Any) -> Example:
    """A model of other parts."""
    return Example(name, Model(setting, **parts), setting, refusal)


EXAMPLES = (
    example("packed tokens"),
    example("two tokens of two sequences", setting=Setting(sequences=2)),
    example("keys of one head", rotate_keys=of_one_head),
    example("weights in float32", of_heads=lambda x, w, by: (linear(x, w).float() * by).to(torch.float16)),
    example("another epsilon", "requires 1e-06, which it has compiled in", eps=1e-5),
    example("weights as they are", "weights of heads: they are multiplied by 1", factor=1.0),
    Example("the root of the heads alone", Model(factor=0.5), of_bfloat16, "requires 0.125"),
    example("turned and divided", "queries of the indexer: they are multiplied by 0.5", turned=0.5),
    example("keys turned and divided", "keys of the indexer: they are multiplied by 0.5", turned_keys=0.5),
    example("halves", "they are rotated from half to half", rotate=in_halves, rotate_keys=in_halves),
    example("keys in halves", "they are rotated from half to half", rotate_keys=in_halves),
    example("scales in float32", PART, kept=as_they_are),
    Example("weights in the dtype of the model", Model(of_heads=in_their_own), of_bfloat16, PART),
    example("keys of another place", "a place in a page is not proven to be below", write=anywhere),
    Example("pages in lines", Model(write=in_nz), in_lines, "its pages are lines of NZ"),
    Example("in float16 before", Model(before=Tensor.half), of_bfloat16, "rounded to float16 before"),
)  # fmt: skip
TRIED = {"lightning_indexer_prolog_pto": EXAMPLES}
