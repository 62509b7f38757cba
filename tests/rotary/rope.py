"""(a, b) -> (a cos - b sin, b cos + a sin): the inputs, tables, layouts and reference that all RoPE entries share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.corpus.base import APPLY_ROTARY, INTERLEAVE_ROPE, ROTARY_MUL, Form, Spelling, activations, wide

THETA = 10000.0
TABLE_ROWS = 32
Q_HEADS, K_HEADS = 4, 2

Part = tuple[int | None, int | None]
WHOLE: Part = (None, None)
FIRST_64: Part = (0, 64)
LAST_64: Part = (-64, None)


@dataclass(frozen=True)
class RopeInputs:
    """Float64 q [B, S, N, D], k [B, S, K, D], inv_freq [R / 2] of R rotated channels; int64 positions [B, S]."""

    q: Tensor
    k: Tensor
    positions: Tensor
    inv_freq: Tensor

    @property
    def angles(self) -> Tensor:
        """[B, S, R / 2] radians."""
        return self.positions[..., None].double() * self.inv_freq


Tables = Callable[[RopeInputs, torch.dtype], tuple[Tensor, ...]]


def rope_inputs(B: int, S: int, D: int, R: int, q_heads: int, *, per_sequence: bool) -> RopeInputs:
    """Positions differ between the sequences of the batch when `per_sequence`, as in decoding."""
    starts = torch.arange(B)[:, None] * 2 if per_sequence else torch.zeros(B, 1, dtype=torch.int64)
    inv_freq = THETA ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
    q, k = activations(D, B, S, q_heads, D), activations(D + 1, B, S, K_HEADS, D)
    return RopeInputs(q, k, starts + torch.arange(S) + 3, inv_freq)


def cos_sin(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """cos, sin [B, S, R / 2]."""
    return i.angles.cos().to(dtype), i.angles.sin().to(dtype)


def doubled_halves(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """cos, sin [B, S, R], each the same half twice."""
    return tuple(torch.cat((t, t), dim=-1) for t in cos_sin(i, dtype))


def doubled_halves_float(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same in float32."""
    return doubled_halves(i, wide(dtype))


def doubled_halves_row(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """cos, sin [1, S, R] for a whole batch at the same positions."""
    return tuple(t[:1] for t in doubled_halves(i, dtype))


def doubled_halves_plain(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """cos, sin [S, R]."""
    return tuple(t[0] for t in doubled_halves(i, dtype))


def doubled_pairs(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """cos, sin [B, S, R], each channel twice in a row."""
    return tuple(t.repeat_interleave(2, dim=-1) for t in cos_sin(i, dtype))


def doubled_halves_tokens(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """cos, sin [T, 1, R] for packed tokens."""
    return tuple(t.flatten(0, 1).unsqueeze(1) for t in doubled_halves(i, dtype))


def cos_sin_rows(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """cos, sin [S, R / 2] for a whole batch at the same positions."""
    return tuple(t[0] for t in cos_sin(i, dtype))


def cos_sin_rows_float(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same in float32."""
    return cos_sin_rows(i, wide(dtype))


def complex_rows(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """One complex table [S, R / 2]."""
    return (torch.complex(*cos_sin_rows(i, wide(dtype))),)


def complex_batch(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """One complex table [B, S, R / 2]."""
    return (torch.complex(*cos_sin(i, wide(dtype))),)


def stacked_rows(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """One real table [S, R / 2, 2] of (cos, sin)."""
    return (torch.stack(cos_sin_rows(i, wide(dtype)), dim=-1),)


def indexed_tables(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """cos, sin [rows, R] for all positions, and position ids [B, S]."""
    angles = torch.arange(TABLE_ROWS, dtype=torch.float64)[:, None] * i.inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype), i.positions


def joint_cache(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """One table [rows, R] = (cos | sin) for all positions, and the positions of all tokens [T]."""
    angles = torch.arange(TABLE_ROWS, dtype=torch.float64)[:, None] * i.inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype), i.positions.flatten()


def frequencies(i: RopeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """inv_freq [R / 2] in float32, and position ids [B, S]."""
    return i.inv_freq.to(wide(dtype)), i.positions


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "BSND": lambda x: x,
    "BNSD": lambda x: x.transpose(1, 2).contiguous(),
    "BSH": lambda x: x.flatten(2),
    "TND": lambda x: x.flatten(0, 1),
    "TH": lambda x: x.flatten(0, 1).flatten(1),
}


def rotate(x: Tensor, angles: Tensor, family: str) -> Tensor:
    """float64 x [B, S, N, R] and angles [B, S, R / 2] -> [B, S, N, R], pair by pair through index lists."""
    half = torch.arange(x.shape[-1] // 2)
    halves, pairs = (half, half + len(half)), (2 * half, 2 * half + 1)
    source = halves if family == "rope_half" else pairs
    target = pairs if family == "rope_interleaved" else halves
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    a, b = x[..., source[0]], x[..., source[1]]
    out = x.clone()
    out[..., target[0]] = a * cos - b * sin
    out[..., target[1]] = b * cos + a * sin
    return out


def both(form: Form) -> Form:
    """q and k through the same function of one tensor, as most models call it."""

    def apply(q, k, *tables):
        return form(q, *tables), form(k, *tables)

    return apply


@dataclass(frozen=True)
class Rope:
    """One RoPE entry: `form` takes q and k (or q alone) in `layout` and the tables.

    `part` is the range of the D channels that rotates; `q_heads` and `per_sequence` describe the inputs;
    `inverse` rotates by the negative angle.
    """

    form: Form
    family: str
    tables: Tables = doubled_halves
    layout: str = "BNSD"
    D: int = 64
    part: Part = WHOLE
    alone: bool = False
    q_heads: int = Q_HEADS
    per_sequence: bool = True
    inverse: bool = False

    def inputs(self, B: int, S: int) -> RopeInputs:
        R = len(range(self.D)[slice(*self.part)])
        return rope_inputs(B, S, self.D, R, self.q_heads, per_sequence=self.per_sequence)

    def subjects(self, i: RopeInputs) -> tuple[Tensor, ...]:
        return (i.q,) if self.alone else (i.q, i.k)

    def make(self, dtype: torch.dtype, B: int, S: int) -> tuple[Form, tuple[Tensor, ...]]:
        i = self.inputs(B, S)
        rotated = tuple(LAYOUTS[self.layout](x).to(dtype) for x in self.subjects(i))
        return self.form, (*rotated, *self.tables(i, dtype))

    def reference(self, dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        i = self.inputs(B, S)
        outputs: list[Tensor] = []
        part, angles = slice(*self.part), -i.angles if self.inverse else i.angles
        for x in self.subjects(i):
            out = x.clone()
            out[..., part] = rotate(x[..., part], angles, self.family)
            outputs.append(LAYOUTS[self.layout](out))
        return tuple(outputs)

    def expect(self) -> dict[str, int]:
        if self.family == "rope_half":
            return {ROTARY_MUL: 1} if self.alone else {APPLY_ROTARY: 1}
        operator = ROTARY_MUL if self.family == "rope_interleaved" else INTERLEAVE_ROPE
        return {operator: 1 if self.alone else 2}


def spelling(label: str, note: str, rope: Rope) -> Spelling:
    """The corpus entry of a RoPE form."""
    return Spelling(f"{rope.family}/{label}", rope.family, rope.make, rope.expect(), rope.reference, note)
