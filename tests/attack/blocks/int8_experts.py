"""Experts of a mixture in W8A8, in the ways that people write them, and what only looks like them.

Rows of tokens are quantised by token or after they are repeated; the matrices that they meet are gathered for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..writer import Writer
from .experts import Mixture, router, summed
from .quant import quantised

OTHERS = (
    "rows are divided by that of others",
    "matrix of others",
    "rows of others",
    "scale of lanes",
    "seven",
    "sum",
    "twice scaled",
)


@dataclass(frozen=True)
class Int8Mixture(Mixture):
    """A mixture whose matrices are in int8; `up` may be without a gate, [E, I, H].

    Attributes:
        of_up, of_down: scales of the rows of the matrices.
        inner: I.
    """

    of_up: str = ""
    of_down: str = ""
    inner: int = 0


def mixture(w: Writer, gated: bool) -> Int8Mixture:
    count, width, inner = w.pick(2, 4, 6), w.pick(64, 128), w.pick(32, 64)
    choices = w.pick(1, 2, 2, 3) if count > 2 else w.pick(1, 2)
    tokens = w.input(("T", width), "rows", name="tokens")
    weights, experts = router(w, tokens, count, choices)
    lanes = 2 * inner if gated else inner
    up, down = w.input((count, lanes, width), "int8", name="up"), w.input((count, width, inner), "int8", name="d")
    of_up = w.input((count, lanes), f"scale {width}", name="of_up")
    of_down = w.input((count, width), f"scale {inner}", name="of_down")
    wrong = w.pick(*OTHERS) if w.maybe(3) else ""
    return Int8Mixture(tokens, weights, experts, up, down, count, choices, width, wrong, of_up, of_down, inner)


def product(w: Writer, m: Int8Mixture, int8: str, scale: str, which: str) -> str:
    """Rows [T, K, M] by the matrices that are gathered for them, in 16 bits."""
    matrices, scales = (m.up, m.of_up) if which == "up" else (m.down, m.of_down)
    other = w.let(w.pick(f"{m.experts}.flip(-1)", f"({m.experts} + 1) % {matrices}.shape[0]"), "other")
    chosen = other if m.wrong == "matrix of others" else m.experts
    of_chosen = other if m.wrong == "rows are divided by that of others" else m.experts
    gathered = w.let(w.pick(f"{matrices}[{chosen}]", f"{matrices}[{chosen}.flatten()].unflatten(0, {chosen}.shape)"))
    exact = w.pick("int", "float", "double")
    y = w.let(w.pick(
        f"({gathered}.{exact}() @ {int8}.{exact}().unsqueeze(-1)).squeeze(-1).float()",
        f"({int8}.{exact}().unsqueeze(2) @ {gathered}.{exact}().mT).squeeze(2).float()",
        f"torch.einsum('tkm,tknm->tkn', {int8}.float(), {gathered}.float())",
    ), "y")  # fmt: skip
    channels = w.let(f"{scales}[{of_chosen}]", "channels")
    if m.wrong == "twice scaled":
        channels = w.let(f"{channels} * {channels}", "channels")
    y = w.let(w.pick(f"{y} * {scale} * {channels}", f"{y} * ({scale} * {channels})", f"{y} * {channels} * {scale}"))
    return w.let(f"{y}.to({'torch.bfloat16' if w.dtype == 'float32' else f'{m.tokens}.dtype'})", "y")


def activated(w: Writer, m: Int8Mixture, both: str, gated: bool) -> str:
    if not gated:
        return w.let(w.pick(f"F.relu({both})", f"F.gelu({both}, approximate='tanh')", f"F.silu({both})"), "hidden")
    gate, up = w.both(w.pick(f"{both}.chunk(2, dim=-1)", f"{both}.split({m.inner}, -1)"), 2, "g")
    return w.let(
        w.pick(f"F.silu({gate}) * {up}", f"{up} * F.silu({gate})", f"F.gelu({gate}, approximate='tanh') * {up}"), "h"
    )


def numbers(w: Writer, m: Int8Mixture, x: str) -> tuple[str, str]:
    """Rows in int8 with their scales, sometimes in fewer bits or with a scale that is not that of a row."""
    if m.wrong == "seven":
        scale = w.let(f"{x}.float().abs().amax(-1, keepdim=True) / 7", "scale")
        return w.let(f"({x}.float() / {scale}).round().clamp(-8, 7).to(torch.int8)", "whole"), scale
    if m.wrong == "scale of lanes":
        scale = w.let(f"{x}.float().abs().amax(0, keepdim=True).clamp(min=1e-3) / 127", "scale")
        return w.let(f"({x}.float() / {scale}).round().to(torch.int8)", "whole"), w.let(f"{scale}.amax()", "one")
    return quantised(w, x)


def int8_experts(w: Writer) -> None:
    """Both products in int8, quantisation before each."""
    gated = not w.maybe(4)
    m = mixture(w, gated)
    if w.maybe():
        int8, scale = numbers(w, m, m.tokens)
        rows = f".unsqueeze(1).expand(-1, {m.choices}, -1)"
        int8, scale = w.let(f"{int8}{rows}", "rows"), w.let(f"{scale}.expand({m.tokens}.shape[0], 1){rows}", "scales")
    else:
        repeated = f"{m.tokens}.repeat_interleave({m.choices}, 0)"
        if m.wrong == "rows of others":
            repeated = f"{m.tokens}.repeat({m.choices}, 1)"
        rows = w.let(f"{repeated}.unflatten(0, (-1, {m.choices}))", "rows")
        int8, scale = numbers(w, m, rows)
    if not m.wrong and w.narrow:
        w.fuses("routed_experts", "quantisation", target="ascend910_93")
    hidden = activated(w, m, product(w, m, int8, scale, "up"), gated)
    y = product(w, m, *numbers(w, m, hidden), "down")
    listed = summed(w, m, w.let(f"{y}.flatten(0, 1)", "listed"), m.weights)
    w.give(w.let(f"{listed}.to({m.tokens}.dtype)", "y"), ("T", m.width))


BLOCKS = (int8_experts,)
