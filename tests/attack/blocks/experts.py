"""Experts of a mixture in the ways that people write them, and what only looks like them.

Rows of tokens are sorted by expert and multiplied in groups, or meet matrices that are gathered for them; a loop over
all experts multiplies every token by each.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..writer import Writer


@dataclass(frozen=True)
class Mixture:
    """Names of the tokens [T, H], of what each chose [T, K], of the matrices, and how many there are of each.

    Attributes:
        up: gate and up of all experts, [E, 2 · I, H].
        down: [E, H, I].
        wrong: which part is another one, or written in a way that is not read; "" for none.
    """

    tokens: str
    weights: str
    experts: str
    up: str
    down: str
    count: int
    choices: int
    width: int
    wrong: str = ""

    @property
    def listed(self) -> str:
        return f"{self.experts}.reshape(-1)"


def mixture(w: Writer, *wrong: str) -> Mixture:
    """Tokens, what a router chose for them, and the matrices of the experts; sometimes one part is to be another."""
    count, width, inner = w.pick(2, 4, 6), w.pick(64, 128), w.pick(32, 64)
    choices = w.pick(1, 2, 2, 3) if count > 2 else w.pick(1, 2)
    tokens = w.take(("T", width), "tokens")
    weights, experts = router(w, tokens, count, choices)
    up, down = (
        w.input((count, 2 * inner, width), "matrix", name="up"),
        w.input((count, width, inner), "matrix", name="d"),
    )
    other = w.pick(*wrong) if w.maybe(3) else ""
    return Mixture(tokens, weights, experts, up, down, count, choices, width, other)


def router(w: Writer, tokens: str, count: int, choices: int) -> tuple[str, str]:
    """Weights and experts [T, K] of logits that are no two alike."""
    logits = w.input(("T", count), "apart", name="logits")
    soft = w.let(w.pick(f"{logits}.softmax(-1, dtype=torch.float32)", f"F.softmax({logits}.float(), dim=-1)",
                        f"{logits}.float().sigmoid()"), "soft")  # fmt: skip
    soft = w.let(f"{soft}.double()", "soft") if w.maybe(8) else soft
    if w.maybe(4):
        return by_sorting(w, soft, choices)
    weights, experts = w.both(
        w.pick(f"{soft}.topk({choices}, dim=-1)", f"torch.topk({soft}, {choices}, dim=-1)"), 2, "t"
    )
    total = f"{weights}.sum(-1, keepdim=True)"
    weights = w.let(w.pick(weights, f"{weights} / {total}", f"{weights} / ({total} + 1e-20)", f"{weights} * 2.5"), "w")
    return w.let(w.pick(weights, f"{weights}.to({tokens}.dtype)"), "w"), experts


def by_sorting(w: Writer, soft: str, choices: int) -> tuple[str, str]:
    """The first of sorted weights."""
    stable = w.pick("", ", stable=True")
    if w.maybe():
        experts = w.let(f"{soft}.argsort(dim=-1, descending=True{stable})[..., :{choices}]", "experts")
        return w.let(f"{soft}.gather(-1, {experts})", "w"), experts
    values, order = w.both(f"torch.sort({soft}, dim=-1, descending=True{stable})", 2, "t")
    return w.let(f"{values}[:, :{choices}]", "w"), w.let(f"{order}[:, :{choices}]", "experts")


def gated(w: Writer, both: str) -> str:
    """What is between the products, of gate and up in one."""
    if w.maybe(4):
        return w.let(f"F.{w.pick('silu', 'gelu')}({both}[..., ::2]) * {both}[..., 1::2]", "hidden")
    gate, up = w.both(w.pick(f"{both}.chunk(2, dim=-1)", f"torch.chunk({both}, 2, -1)"), 2, "g")
    return w.let(
        w.pick(f"F.silu({gate}) * {up}", f"{up} * F.silu({gate})", f"{gate} * {gate}.sigmoid() * {up}"), "hidden"
    )


def given(w: Writer, name: str, m: Mixture) -> None:
    """The result, perhaps beside an expert that all tokens share."""
    if w.maybe(4):
        shared = w.input((m.width, m.width), "matrix", name="shared")
        name = w.let(
            w.pick(f"{name} + F.linear({m.tokens}, {shared})", f"F.linear({m.tokens}, {shared}) + {name}"), "y"
        )
    w.give(w.let(w.pick(name, f"{name}.to({m.tokens}.dtype)"), "y"), ("T", m.width))


# sorted rows ---------------------------------------------------------------------------------------------------------


def ends(w: Writer, m: Mixture, listed: str) -> str:
    """Where the rows of each expert end."""
    most = w.pick(m.count - 1, m.count) if m.wrong != "bins" else w.pick(m.count - 2, m.count + 1)
    if m.wrong == "counted":
        listed = w.let(w.pick(f"({listed} + 1) % {m.count}", f"{m.count - 1} - {listed}"), "other")
    counts = w.let(w.pick(
        f"torch.histc({listed}.float(), bins={m.count}, min=0, max={most})",
        f"torch.zeros({m.count}, dtype=torch.int64).scatter_add(0, {listed}, torch.ones_like({listed}))",
    ) if m.wrong != "unread" else w.pick(
        f"F.one_hot({listed}, {m.count}).sum(0)", f"({listed}[:, None] == torch.arange({m.count})).sum(0)"
    ), "counts")  # fmt: skip
    counts = w.let(f"{counts}.roll(1)", "counts") if m.wrong == "groups" else counts
    found = w.let(w.pick(f"{counts}.cumsum(0, dtype=torch.int32)", f"torch.cumsum({counts}, 0).int()",
                         f"{counts}.cumsum(0).to(torch.int32)"), "ends")  # fmt: skip
    return w.let(f"torch.cat(({found}[1:], {found}[-1:]))", "ends") if m.wrong == "offset" else found


def order(w: Writer, m: Mixture) -> tuple[str, str]:
    """The list, sorted or not, and the order that sorts it."""
    listed = w.let(w.pick(m.listed, f"{m.experts}.flatten()", f"{m.experts}.view(-1)"), "listed")
    turned = ", descending=True" if m.wrong == "turned" else ""
    if w.maybe():
        return listed, w.let(
            w.pick(f"{listed}.argsort(stable=True{turned})", f"torch.argsort({listed}{turned})"), "order"
        )
    found, places = w.both(
        w.pick(f"{listed}.sort({turned[2:]})", f"torch.sort({listed}, stable=True{turned})"), 2, "sorted"
    )
    return w.pick(found, listed), places


def owner(w: Writer, m: Mixture, places: str) -> str:
    """The token of each sorted row."""
    count = f"{m.tokens}.shape[0]"
    if m.wrong == "owner":
        return w.let(w.pick(f"{places} % {count}", f"{places} // {m.choices + 1}"), "owner")
    return w.let(w.pick(
        f"{places} // {m.choices}", f"torch.div({places}, {m.choices}, rounding_mode='floor')",
        f"torch.arange({count}).repeat_interleave({m.choices})[{places}]",
        f"torch.arange({count}).unsqueeze(1).expand(-1, {m.choices}).reshape(-1)[{places}]",
    ), "owner")  # fmt: skip


def rows_of(w: Writer, m: Mixture, places: str, owners: str) -> str:
    """Rows of tokens, sorted."""
    return w.let(w.pick(
        f"{m.tokens}[{owners}]", f"{m.tokens}.index_select(0, {owners})",
        f"{m.tokens}.gather(0, {owners}.unsqueeze(-1).expand(-1, {m.width}))",
        f"{m.tokens}.repeat_interleave({m.choices}, dim=0)[{places}]",
        f"{m.tokens}[:, None].expand(-1, {m.choices}, -1).reshape(-1, {m.width})[{places}]",
    ), "rows")  # fmt: skip


def grouped(w: Writer, rows: str, matrices: str, at: str) -> str:
    """By torch, or as transformers does where torch compiles none of that dtype."""
    if w.dtype != "bfloat16" or w.maybe(5):
        return w.let(f"torch.ops.transformers.grouped_mm_fallback({rows}, {matrices}.mT, {at})", "y")
    return w.let(f"{w.pick('torch._grouped_mm', 'F.grouped_mm')}({rows}, {matrices}.mT, offs={at})", "y")


def through(w: Writer, m: Mixture, rows: str, at: str) -> str:
    """Both products of groups."""
    if w.maybe(5):
        half = w.let(f"{m.up}.shape[1] // 2", "half")
        gate, up = (grouped(w, rows, f"{m.up}[:, {cut}]", at) for cut in (f":{half}", f"{half}:"))
        hidden = w.let(f"F.silu({gate}) * {up}", "hidden")
    else:
        hidden = gated(w, grouped(w, rows, m.up, at))
    found = grouped(w, hidden, m.down, at)
    return w.let(f"{found} + {m.down}[{m.listed}.sort()[0], :, 0]", "y") if m.wrong == "bias" else found


def back(w: Writer, m: Mixture, y: str, places: str) -> str:
    """Rows put back as pairs are listed."""
    if m.wrong == "back":
        return w.let(
            w.pick(f"{y}[{places}]", f"{y}[{places}.argsort() // 2]", f"{y}[{m.listed}.argsort().argsort()]"), "b"
        )
    if m.wrong == "twice":
        return w.let(f"torch.zeros_like({y}).index_copy(0, {places} // 2, {y})", "b")
    if w.maybe():
        inverse = w.let(w.pick(
            f"{places}.argsort()",
            f"torch.zeros_like({places}).scatter(0, {places}, torch.arange({places}.shape[0]))",
            f"torch.zeros_like({places}).index_copy(0, {places}, torch.arange({places}.shape[0]))",
        ), "inverse")  # fmt: skip
        return w.let(f"{y}[{inverse}]", "b")
    return w.let(w.pick(
        f"torch.zeros_like({y}).index_copy(0, {places}, {y})", f"torch.zeros_like({y}).index_put(({places},), {y})",
        f"torch.zeros_like({y}).scatter(0, {places}[:, None].expand_as({y}), {y})",
    ), "b")  # fmt: skip


def added(w: Writer, m: Mixture, y: str, owners: str) -> str:
    """Rows added to those of their tokens."""
    return w.let(w.pick(
        f"torch.zeros({m.tokens}.shape, dtype={y}.dtype).index_add(0, {owners}, {y})",
        f"torch.zeros({m.tokens}.shape, dtype={y}.dtype).scatter_add(0, {owners}[:, None].expand_as({y}), {y})",
        f"torch.zeros({m.tokens}.shape, dtype={y}.dtype).index_put(({owners},), {y}, accumulate=True)",
    ), "y")  # fmt: skip


def summed(w: Writer, m: Mixture, listed: str, weights: str) -> str:
    """The sum of rows as pairs are listed, weighed here unless there are no weights."""
    if m.wrong == "sum":
        rows = w.let(f"{listed}.view({m.choices}, -1, {m.width})", "rows")
        return w.let(f"{rows}.sum(0)", "y") if not weights else w.let(f"({rows} * {weights}.mT[..., None]).sum(0)", "y")
    rows = w.let(
        w.pick(f"{listed}.view(-1, {m.choices}, {m.width})", f"{listed}.reshape(*{m.experts}.shape, -1)"), "rows"
    )
    if not weights:
        return w.let(w.pick(f"{rows}.sum(1)", f"{rows}.sum(dim=-2)", f"torch.sum({rows}, dim=1)"), "y")
    weights = w.let(f"{weights}.to({rows}.dtype)", "w") if w.maybe() else weights
    return w.let(w.pick(
        f"({rows} * {weights}.unsqueeze(-1)).sum(1)", f"({weights}[..., None] * {rows}).sum(dim=1)",
        f"torch.bmm({weights}.unsqueeze(1).to({rows}.dtype), {rows}).squeeze(1)",
        f"torch.einsum('tkd,tk->td', {rows}, {weights}.to({rows}.dtype))",
    ), "y")  # fmt: skip


OTHERS = (
    "counted", "groups", "offset", "turned", "owner", "bias", "back", "twice", "sum", "weights", "bins", "unread",
)  # fmt: skip


def sorted_experts(w: Writer) -> None:
    """Rows sorted by expert, products of groups, rows put back or added to their tokens."""
    m = mixture(w, *OTHERS)
    listed, places = order(w, m)
    owners = owner(w, m, places)
    y = through(w, m, rows_of(w, m, places, owners), ends(w, m, listed))
    if not m.wrong:
        w.fuses("routed_experts", target="ascend910_93")
    by = (
        w.pick(f"{places}", f"{places}.argsort()", f"torch.arange({places}.shape[0])")
        if m.wrong == "weights"
        else places
    )
    weighed = w.pick(f"{y} * {m.weights}.reshape(-1)[{by}].unsqueeze(-1)",
                     f"{y} * torch.gather({m.weights}.flatten(), 0, {by})[:, None]")  # fmt: skip
    if w.maybe(3):
        given(w, added(w, m, w.let(weighed, "y"), owners), m)
    elif w.maybe():
        given(w, summed(w, m, back(w, m, w.let(weighed, "y"), places), ""), m)
    else:
        given(w, summed(w, m, back(w, m, y, places), m.weights), m)


# gathered matrices ---------------------------------------------------------------------------------------------------


def gathered_experts(w: Writer) -> None:
    """Every row by matrices that are gathered for it."""
    m = mixture(w, "others", "shifted", "weights", "sum", "bias")
    first, second = m.experts, m.experts
    if m.wrong == "others":
        second = w.let(w.pick(f"{m.experts}.flip(-1)", f"{m.experts}.roll(1, 0)", f"{m.experts}.sort(-1)[0]"), "others")
    if m.wrong == "shifted":
        first = second = w.let(w.pick(f"({m.experts} + 1) % {m.count}", f"{m.count - 1} - {m.experts}",
                                      f"{m.experts}.clamp(max={m.count - 2})"), "others")  # fmt: skip
    weights = w.let(f"{m.weights}.flip({w.pick(0, 1)})", "w") if m.wrong == "weights" else m.weights
    if not m.wrong:
        w.fuses("routed_experts", target="ascend910_93")
    listed = w.pick(one_by_one, by_einsum, rows_first)(w, m, first, second)
    if m.wrong == "bias":
        listed = w.let(f"{listed} + {m.down}[{second}, :, 0].view({listed}.shape)", "y")
    given(w, summed(w, m, listed, weights), m)


def one_by_one(w: Writer, m: Mixture, first: str, second: str) -> str:
    """A product for each pair, of pairs that are listed."""
    rows = w.let(w.pick(f"{m.tokens}.repeat_interleave({m.choices}, dim=0)",
                        f"{m.tokens}[torch.arange({m.tokens}.shape[0]).repeat_interleave({m.choices})]",
                        f"{m.tokens}[:, None].expand(-1, {m.choices}, -1).flatten(0, 1)"), "rows")  # fmt: skip
    both = w.let(f"torch.bmm({m.up}[{first}.reshape(-1)], {rows}.unsqueeze(-1)).squeeze(-1)", "both")
    return w.let(f"torch.bmm({m.down}[{second}.flatten()], {gated(w, both)}.unsqueeze(-1)).squeeze(-1)", "y")


def by_einsum(w: Writer, m: Mixture, first: str, second: str) -> str:
    hidden = gated(w, w.let(f"torch.einsum('td,tkjd->tkj', {m.tokens}, {m.up}[{first}])", "both"))
    return w.let(f"torch.einsum('tki,tkdi->tkd', {hidden}, {m.down}[{second}])", "y")


def rows_first(w: Writer, m: Mixture, first: str, second: str) -> str:
    """Rows before matrices, or behind them."""
    if w.maybe():
        hidden = gated(w, w.let(f"({m.tokens}[:, None, None, :] @ {m.up}[{first}].mT).squeeze(2)", "both"))
        return w.let(f"({hidden}.unsqueeze(2) @ {m.down}[{second}].mT).squeeze(2)", "y")
    hidden = gated(w, w.let(f"torch.matmul({m.up}[{first}], {m.tokens}[:, None, :, None]).squeeze(-1)", "both"))
    return w.let(f"({m.down}[{second}] @ {hidden}.unsqueeze(-1)).squeeze(-1)", "y")


# loops ---------------------------------------------------------------------------------------------------------------


def looped_experts(w: Writer) -> None:
    """Every token by every expert, with the weight that it gives it, which is mostly 0."""
    m = mixture(w, "missing", "weights")
    if m.count > 4:
        return
    total = w.let(f"torch.zeros_like({m.tokens}, dtype={w.pick('torch.float32', f'{m.tokens}.dtype')})", "total")
    for expert in range(m.count - 1 if m.wrong == "missing" else m.count):
        chosen = w.let(f"{m.experts} == {(expert + 1) % m.count if m.wrong == 'weights' else expert}", "chosen")
        share = w.let(w.pick(f"({m.weights} * {chosen}).sum(-1, keepdim=True)",
                             f"{m.weights}.masked_fill(~{chosen}, 0).sum(-1)[:, None]"), "share")  # fmt: skip
        hidden = gated(w, w.let(f"F.linear({m.tokens}, {m.up}[{expert}])", "both"))
        y = w.let(f"F.linear({hidden}, {m.down}[{expert}])", "y")
        total = w.let(w.pick(f"{total} + {y} * {share}", f"{total} + ({share} * {y}).to({total}.dtype)"), "total")
    given(w, total, m)


def grouped_router(w: Writer) -> None:
    """Experts in groups, of which the best alone are chosen from."""
    groups, each, best, choices = w.pick((4, 4, 2, 2), (2, 8, 1, 3), (4, 8, 2, 4))
    logits = w.input(("T", groups * each), "apart", name="logits")
    soft = w.let(w.pick(f"{logits}.float().sigmoid()", f"{logits}.softmax(-1, dtype=torch.float32)"), "soft")
    biased = soft
    if w.maybe():
        biased = w.let(f"{soft} + {w.input((groups * each,), dtype='float32', name='bias')}", "biased")
    parts = w.let(f"{biased}.view(-1, {groups}, {each})", "parts")
    rank = w.let(w.pick(f"{parts}.amax(-1)", f"{parts}.topk(2, dim=-1)[0].sum(-1)"), "rank")
    chosen = w.let(f"{rank}.topk({best}, dim=-1, sorted=False)[1]", "chosen")
    seen = w.let(f"torch.zeros_like({rank}).scatter_(1, {chosen}, 1)", "seen")
    seen = w.let(f"{seen}.unsqueeze(-1).expand(-1, {groups}, {each}).reshape(-1, {groups * each}).bool()", "seen")
    left = w.let(f"{biased}.masked_fill(~{seen}, {w.pick('0.0', '-math.inf')})", "left")
    ordered = w.maybe()
    experts = w.let(f"{left}.topk({choices}, dim=-1{'' if ordered else ', sorted=False'})[1]", "experts")
    weights = w.let(f"{soft}.gather(1, {experts})", "w")
    total = f"{weights}.sum(-1, keepdim=True)"
    weights = w.let(w.pick(weights, f"{weights} / ({total} + 1e-20)", f"{weights} / {total} * 2.5"), "w")
    if not ordered:
        weights, experts = (w.let(f"{each}.sort(-1)[0]", "sorted") for each in (weights, experts))
    w.kept += [weights, experts]


BLOCKS = (
    grouped_router,
    sorted_experts,
    sorted_experts,
    sorted_experts,
    gathered_experts,
    gathered_experts,
    looped_experts,
)
