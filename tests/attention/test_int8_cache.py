"""Attention to int8 keys and values on a chip: what is read as it lies, what is told of scales, what becomes floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion import Example
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.testing import Trial, means_what_it_says, trial
from tests.examples.inputs import fixed, normal, tensors
from tests.examples.quantisation import scales, weights
from tests.support.fused import FIA, call, checked

pytestmark = pytest.mark.rotates(8)

RULE = next(each for each in installed().rules if each.name == "attention")
Scales = Callable[["Sizes"], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Sizes:
    """Sequences, heads, queries, lanes, rows of a page, pages of a sequence; how the cache lies."""

    batch: int = 2
    heads: int = 8
    shared: int = 2
    queries: int = 1
    width: int = 64
    size: int = 32
    pages: int = 3
    kind: str = "pages"

    @property
    def room(self) -> int:
        return self.size * self.pages

    def cache(self) -> tuple[int, ...]:
        blocks, lanes = self.batch * self.pages + 1, self.shared * self.width
        return {
            "rows": (self.batch, self.shared, self.room, self.width),
            "positions": (self.batch, self.room, self.shared, self.width),
            "pages": (blocks, self.size, lanes),
            "heads": (blocks, self.shared, self.size, self.width),
            "lines": (blocks, self.shared, self.width // 32, self.size, 32),
            "flat lines": (blocks, lanes // 32, self.size, 32),
        }[self.kind]

    def read(self, cache: Tensor, table: Tensor) -> Tensor:
        """Rows [B, M, T, D]."""
        if self.kind in ("rows", "positions"):
            return cache if self.kind == "rows" else cache.transpose(1, 2)
        pages = cache[table]
        if self.kind == "pages":
            return pages.reshape(table.shape[0], self.room, self.shared, self.width).transpose(1, 2)
        if self.kind == "heads":
            return pages.transpose(1, 2).flatten(2, 3)
        lines = pages.unflatten(2, (self.shared, -1)) if self.kind == "flat lines" else pages
        return lines.permute(0, 2, 1, 4, 3, 5).reshape(table.shape[0], self.shared, self.room, self.width)

    def table(self) -> Tensor:
        return (torch.arange(self.batch * self.pages) * 3 + 1).reshape(self.batch, -1) % (self.batch * self.pages + 1)

    def lengths(self) -> Tensor:
        return torch.tensor([self.room - 5, self.queries + 1])[: self.batch]

    def hidden(self, lengths: Tensor) -> Tensor:
        last = lengths[:, None] - self.queries + torch.arange(self.queries)
        return (torch.arange(self.room) > last[..., None])[:, None]


def attended(s: Sizes, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    k, v = (each.repeat_interleave(s.heads // s.shared, 1) for each in (k, v))
    scores = (q @ k.mT).float() * s.width**-0.5
    return scores.masked_fill(s.hidden(lengths), -math.inf).softmax(-1).to(v.dtype) @ v


def dequantised(x: Tensor, like: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    rows = x.to(like.dtype)
    return (rows if zero is None else rows - zero) * scale


def decode(s: Sizes, turn: Callable[..., Tensor] = dequantised) -> Callable[..., Tensor]:
    def forward(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, *more: Tensor) -> Tensor:
        k, v = (turn(s.read(each, table), q, *more[at::2]) for at, each in enumerate((keys, values)))
        return attended(s, q, k, v, lengths)

    return forward


def channels(s: Sizes) -> tuple[Tensor, ...]:
    return tuple(fixed(scales(seed, s.shared, 1, s.width).double()) for seed in (3, 4))


def heads(s: Sizes) -> tuple[Tensor, ...]:
    return tuple(fixed(scales(seed, s.shared, 1, 1).double()) for seed in (3, 4))


def one(s: Sizes) -> tuple[Tensor, ...]:
    return tuple(fixed(scales(seed, 1).double()) for seed in (3, 4))


def with_zeros(s: Sizes) -> tuple[Tensor, ...]:
    return (*channels(s), *(fixed((weights(seed, s.shared, 1, s.width) // 8).double()) for seed in (5, 6)))


def fused(
    s: Sizes, of: Scales = channels, turn: Callable[..., Tensor] = dequantised, dtype: torch.dtype = torch.bfloat16,
    target: str = "ascend910_93",
) -> Trial:  # fmt: skip
    q = s.batch, s.heads, s.queries, s.width
    caches = [weights(seed, *s.cache()) for seed in (1, 2)]
    example = Example("a step", decode(s, turn), tensors(q, *caches, s.table(), s.lengths(), *of(s)))
    options = Options(target=target, lower="eager", plan_lower="torchair")
    return checked(trial(RULE, example, dtype, options=options))


def told(t: Trial) -> dict[str, Any]:
    """What the operator is told of int8, tensors by their shapes."""
    given = {name: each for name, each in call(t, FIA).kwargs.items() if "quant" in name}
    return {name: tuple(each.meta["val"].shape) if hasattr(each, "meta") else each for name, each in given.items()}


def key_dtype(t: Trial) -> torch.dtype:
    return call(t, FIA).args[1].meta["val"].dtype


def reasons(t: Trial) -> list[str]:
    return [each.reason for each in t.outcome.refusals]


def has_dequantised(t: Trial, s: Sizes) -> bool:
    """Whether anything as large as the keys of all sequences is made in floats."""
    size = s.batch * s.shared * s.room * s.width
    values = [node.meta.get("val") for node in t.fused.graph.nodes]
    return any(isinstance(x, Tensor) and x.is_floating_point() and x.numel() >= size for x in values)


KINDS = ("rows", "positions", "pages", "heads")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_int8_is_read_as_it_lies(kind: str, dtype: torch.dtype):
    s = Sizes(kind=kind)
    t = fused(s, dtype=dtype)
    assert key_dtype(t) == torch.int8
    assert not has_dequantised(t, s)
    assert ("block_table" in call(t, FIA).kwargs) == (kind in ("pages", "heads"))
    assert told(t) == dict.fromkeys(("dequant_scale_key", "dequant_scale_value"), (1, 2, 1, 64))


@pytest.mark.parametrize("turn", [
    lambda x, q, s: (x.float() * s.float()).to(q.dtype),
    lambda x, q, s: x.to(q.dtype).mul(s),
    lambda x, q, s: (s.float() * x).to(q.dtype),
    lambda x, q, s: x.to(q.dtype) * s.expand(x.shape),
    lambda x, q, s: (x.transpose(1, 2).flatten(2).to(q.dtype) * s.flatten()).unflatten(2, (2, -1)).transpose(1, 2),
])  # fmt: skip
def test_a_scale_is_one_however_it_is_written(turn: Callable[..., Tensor]):
    s = Sizes()
    t = fused(s, turn=turn)
    assert key_dtype(t) == torch.int8
    assert not has_dequantised(t, s)


@pytest.mark.parametrize(
    ("of", "shape", "mode"),
    [(heads, (2,), 2), (one, (1,), None), (channels, (1, 2, 1, 64), None)],
    ids=("heads", "one", "channels"),
)
def test_scales_are_told_as_they_are_held(of: Scales, shape: tuple[int, ...], mode: int | None):
    t = fused(Sizes(), of)
    modes = {} if mode is None else {"key_quant_mode": mode, "value_quant_mode": mode}
    assert told(t) == dict.fromkeys(("dequant_scale_key", "dequant_scale_value"), shape) | modes


def test_scales_of_heads_beside_those_of_channels_are_told_of_channels():
    t = fused(Sizes(), lambda s: (heads(s)[0], channels(s)[1]))
    assert told(t) == dict.fromkeys(("dequant_scale_key", "dequant_scale_value"), (1, 2, 1, 64))


def test_only_the_offset_of_values_is_told():
    t = fused(Sizes(), with_zeros)
    shapes = dict.fromkeys(("dequant_offset_key", "dequant_offset_value"), (1, 2, 1, 64))
    assert told(t).items() >= shapes.items()
    alone = fused(Sizes(), lambda s: (*channels(s), with_zeros(s)[2], fixed(torch.zeros(1, dtype=torch.float64))))
    assert "dequant_offset_value" in told(alone)


def test_zero_points_of_keys_alone_are_left_out():
    s = Sizes()

    def forward(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, *more: Tensor) -> Tensor:
        k = (s.read(keys, table).float() - more[2].float()) * more[0].float()
        return attended(s, q, k.to(q.dtype), dequantised(s.read(values, table), q, more[1]), lengths)

    caches = [weights(seed, *s.cache()) for seed in (1, 2)]
    inputs = tensors((2, 8, 1, 64), *caches, s.table(), s.lengths(), *channels(s), weights(5, 2, 1, 64))
    t = trial(RULE, Example("a step", forward, inputs), torch.bfloat16, options=Options(target="ascend910_93"))
    means_what_it_says(t)
    assert key_dtype(t) == torch.int8
    assert set(told(t)) == {"dequant_scale_key", "dequant_scale_value"}


def of_float32(s: Sizes) -> tuple[Tensor, ...]:
    return tuple(torch.rand(s.shared, 1, s.width, generator=torch.Generator().manual_seed(3)) / 64 for _ in range(2))


def by_tokens(s: Sizes) -> tuple[Tensor, ...]:
    """In float32, of each token and head."""
    return tuple(scales(seed, s.batch, s.shared, s.room, 1) for seed in (3, 4))


def of_all_heads(s: Sizes) -> tuple[Tensor, ...]:
    return tuple(each[:, :1].clone() for each in by_tokens(s))


def with_zero(x: Tensor, q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return ((x.float() - zero) * scale).to(q.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("of", "shape", "mode"), [(by_tokens, (2, 2, 96), 3), (of_all_heads, (1, 2, 96), 1)], ids=("tokens", "all heads")
)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_tokens_are_told_in_float32(
    kind: str, of: Scales, shape: tuple[int, ...], mode: int, dtype: torch.dtype
):  # fmt: skip
    s = Sizes(kind=kind)
    t = fused(s, of, narrowed, dtype)
    assert key_dtype(t) == torch.int8
    assert not has_dequantised(t, s)
    modes = {"key_quant_mode": mode, "value_quant_mode": mode}
    assert told(t) == dict.fromkeys(("dequant_scale_key", "dequant_scale_value"), shape) | modes


def before_the_turn(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    return (x.transpose(1, 2).float() * scale.transpose(1, 2)).to(q.dtype).transpose(1, 2)


def before_the_split(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """Rows [B, T, M · D] take one scale each, and are split into heads behind it."""
    rows = (x.transpose(1, 2).flatten(2).float() * scale.squeeze(1)).to(q.dtype)
    return rows.unflatten(2, (x.shape[1], -1)).transpose(1, 2)


@pytest.mark.parametrize("kind", ["rows", "positions", "pages"])
@pytest.mark.parametrize("turn", [before_the_turn, before_the_split])
def test_a_scale_that_all_heads_share_is_told_once(kind: str, turn: Callable[..., Tensor]):
    """It is expanded to heads where it stands before the cache is turned, or split into heads."""
    s = Sizes(kind=kind)
    t = fused(s, of_all_heads, turn)
    assert told(t)["key_quant_mode"] == 1
    assert not has_dequantised(t, s)


def narrowed(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).to(q.dtype)


@pytest.mark.parametrize(("s", "of", "turn", "reason"), [
    (Sizes(), of_float32, narrowed, "scale: it is torch.float32, or multiplied by a number"),
    (Sizes(), lambda s: (by_tokens(s)[0], channels(s)[1]), narrowed, "one of both alone has a scale of each"),
    (Sizes(), lambda s: (*by_tokens(s), *with_zeros(s)[2:]), with_zero, "they have a scale of each token and an"),
    (Sizes(), lambda s: tuple(scales(n, s.batch, 1, 1, 1) for n in (3, 4)), narrowed, "or of each sequence"),
    (Sizes(queries=3, kind="rows"), by_tokens, narrowed, "key_quant_mode == 0"),
    (Sizes(), lambda s: (), lambda x, q: x.to(q.dtype) * 0.3, "scale: it is 0.3, which the dtype of x rounds"),
    (Sizes(size=48), channels, dequantised, "block_size % 32 == 0"),
    (Sizes(queries=2, size=128), channels, dequantised, "not given(block_table)"),
    (Sizes(width=48), channels, dequantised, "D % 32 == 0"),
    (Sizes(queries=17, kind="rows"), channels, dequantised, "S <= 16"),
    (Sizes(heads=64, shared=8, width=128, size=64, kind="lines"), channels, dequantised, "block_size in (128, 512)"),
    (Sizes(heads=32, shared=8, width=128, size=128, kind="lines"), channels, dequantised, "N == 10 and num_key"),
    (Sizes(heads=64, shared=8, size=128, kind="lines"), channels, dequantised, "D == 128"),
    (Sizes(heads=64, shared=8, width=128, size=128, kind="lines"), with_zeros, dequantised, "dequant_offset_key"),
])  # fmt: skip
def test_what_the_operator_does_not_take_is_told(
    s: Sizes, of: Scales, turn: Callable[..., Tensor], reason: str
):  # fmt: skip
    t = fused(s, of, turn)
    assert any(reason in each for each in reasons(t)), reasons(t)
    assert "block_table" not in call(t, FIA).kwargs or key_dtype(t) != torch.int8


@pytest.mark.parametrize("kind", ["lines", "flat lines"])
@pytest.mark.parametrize(("heads", "shared"), [(10, 1), (64, 8), (80, 8), (128, 16)])
def test_pages_in_nz_are_read_in_place(heads: int, shared: int, kind: str):
    s = Sizes(heads=heads, shared=shared, width=128, size=128, pages=2, kind=kind)
    t = fused(s)
    assert call(t, FIA).args[1].meta["val"].shape[1:] == (shared, 4, 128, 32)
    assert told(t) == dict.fromkeys(("dequant_scale_key", "dequant_scale_value"), (shared, 1, 128))
    assert call(t, FIA).kwargs["inner_precise"] == 1
    assert not has_dequantised(t, s)


def test_blocks_of_512_are_read_in_nz_and_other_sequences_of_queries_are_in_line():
    large = Sizes(heads=64, shared=8, width=128, size=512, pages=1, kind="lines")
    assert call(fused(large), FIA).kwargs["block_size"] == 512


def test_several_queries_over_rows_have_scales_without_a_dim_for_sequences():
    t = fused(Sizes(queries=3, kind="rows"))
    assert told(t)["dequant_scale_key"] == (2, 64)
    assert key_dtype(t) == torch.int8


@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence(kind: str):
    t = fused(Sizes(batch=1, kind=kind))
    assert key_dtype(t) == torch.int8


def test_a_sink_is_no_key_of_int8():
    """The operator takes sinks of packed sequences alone, which int8 are not."""
    s = Sizes()

    def forward(
        q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, by: Tensor, of: Tensor
    ) -> Tensor:
        k, v = (dequantised(s.read(x, table), q, f).repeat_interleave(4, 1) for x, f in ((keys, by), (values, of)))
        scores = ((q @ k.mT).float() * 0.125).masked_fill(s.hidden(lengths), -math.inf)
        sink = torch.linspace(-1, 1, 8).view(1, -1, 1, 1).expand(2, -1, 1, 1)
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1].to(v.dtype) @ v

    caches = [weights(seed, *s.cache()) for seed in (1, 2)]
    inputs = tensors((2, 8, 1, 64), *caches, s.table(), s.lengths(), *channels(s))
    for target in ("host", "ascend910_93"):
        t = trial(
            RULE, Example("a step", forward, inputs), torch.bfloat16, options=Options(target=target, lower="eager")
        )
        means_what_it_says(t)


def test_int8_arithmetic_is_no_offset():
    """(k8 - z8) in int8 wraps round before it becomes a float."""
    wrapped = lambda x, q, s, z: (x - z).to(q.dtype) * s  # noqa: E731
    t = fused(Sizes(kind="rows"), lambda s: (*channels(s), *(weights(seed, 2, 1, 64) for seed in (5, 6))), wrapped)
    assert "dequant_offset_value" not in told(t)


def test_what_is_added_behind_the_scale_is_no_offset():
    behind = lambda x, q, s, z: x.to(q.dtype) * s + z  # noqa: E731
    t = fused(Sizes(), with_zeros, behind)
    assert key_dtype(t) == torch.bfloat16


def sequences(s: Sizes, dtype: torch.dtype) -> Sequence[Any]:
    q = normal(0, s.batch, s.heads, 1, s.width).to(dtype)
    return (
        q,
        *(weights(seed, *s.cache()) for seed in (1, 2)),
        s.table(),
        s.lengths(),
        *(x.to(dtype) for x in channels(s)),
    )


@pytest.mark.parametrize("kind", ["rows", "pages"])
def test_any_number_of_sequences(kind: str):
    s = Sizes(kind=kind)
    options = {"target": "ascend910_93", "lower": "eager", "plan_lower": "torchair"}
    torch._dynamo.reset()
    compiled = torch.compile(decode(s), backend="cann_fusion", options=options, dynamic=True)
    for batch in (2, 1):
        given = [
            x[:batch] if at in (0, 3, 4) or (at < 3 and kind == "rows") else x
            for at, x in enumerate(sequences(s, torch.bfloat16))
        ]
        want = decode(s)(*(x.double() if x.is_floating_point() else x for x in given))
        assert torch.allclose(compiled(*given).double(), want, atol=0.1, rtol=0.05)
