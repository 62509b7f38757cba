"""A layer of experts of a small Qwen3-MoE, in plain PyTorch: norm, router, the experts of each token, and their sum.

The experts are written in three ways: rows that are sorted by expert, matrices that are gathered for each token, and a
loop over all of them, of which each has modules of its own. All become the same few operators. Prints which, how many
launches that saves, and how far plain and fused are from float64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion

HIDDEN, INNER, EXPERTS, CHOICES = 256, 96, 16, 4
BATCH, TOKENS = 2, 6
OPTIONS = {"target": "ascend910_93", "lower": "eager", "plan_lower": "torchair"}


class Experts(nn.Module):
    """The matrices of all experts in one tensor each, gate and up joined."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * INNER**-0.5)


class Sorted(Experts):
    """Rows of tokens [T, H], sorted by the experts that they chose, and multiplied in groups."""

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        chosen, order = experts.flatten().sort()
        ends = F.one_hot(chosen, EXPERTS).sum(0).cumsum(0).int()
        hidden = gated(grouped(x[order // CHOICES], self.gate_up.mT, ends))
        given = grouped(hidden, self.down.mT, ends) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // CHOICES, given)


class Gathered(Experts):
    """The matrices of the experts that each token chose."""

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        hidden = gated(torch.einsum("th,tkjh->tkj", x, self.gate_up[experts]))
        return torch.einsum("tkh,tk->th", torch.einsum("tki,tkhi->tkh", hidden, self.down[experts]), weights)


class Looped(nn.Module):
    """Every expert is given all tokens, and counts 0 where a token did not choose it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN))
        self.gate, self.up, self.down = (
            nn.ModuleList(nn.Linear(*size, bias=False) for _ in range(EXPERTS)) for size in sizes
        )

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        y, every = torch.zeros_like(x), weights.new_zeros(x.shape[0], EXPERTS).scatter(-1, experts, weights)
        for e, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            y = y + every[:, e, None] * down(F.silu(gate(x)) * up(x))
        return y


class Layer(nn.Module):
    """From the hidden states [B, S, H] to those with what the experts give added."""

    def __init__(self, experts: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(HIDDEN, eps=1e-6), nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = experts()

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.norm(hidden).flatten(0, 1)
        shares, experts = F.softmax(self.router(x), dim=-1, dtype=wide(x)).topk(CHOICES, dim=-1)
        weights = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        return hidden + self.experts(x, experts, weights).view_as(hidden)


def grouped(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each run of rows by its own matrix; in float64, which torch does not multiply in groups, one by one."""
    if x.dtype != torch.float64:
        return torch._grouped_mm(x, matrices, offs=ends)
    return torch.cat([rows @ each for rows, each in zip(x.tensor_split(ends[:-1].cpu().long()), matrices, strict=True)])


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


FORMS = {"sorted": Sorted, "gathered": Gathered, "looped": Looped}


def inputs(dtype: torch.dtype) -> Tensor:
    return torch.randn(BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)


def model(form: str, dtype: torch.dtype) -> Layer:
    torch.manual_seed(0)
    return Layer(FORMS[form]).bfloat16().to(dtype).eval().requires_grad_(False)


def run(call, dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        return call(inputs(dtype))


def main() -> None:
    for form in FORMS:
        with torch.no_grad():
            report = fusion.explain(model(form, torch.bfloat16), inputs(torch.bfloat16), options=OPTIONS)
        print(f"{form}: {report.launches[0]} launches became {report.launches[1]}")
        print("  ", ", ".join(f"{count} {op}" for op, count in sorted(report.ops.items())))
        compiled = torch.compile(model(form, torch.bfloat16), backend="cann_fusion", options=OPTIONS, dynamic=False)
        truth = run(model(form, torch.float64), torch.float64)
        plain, fused = run(model(form, torch.bfloat16), torch.bfloat16), run(compiled, torch.bfloat16)
        errors = [float((y.double() - truth).norm() / truth.norm()) for y in (fused, plain)]
        print(f"   relative error {errors[0]:.2e} fused, {errors[1]:.2e} plain")


if __name__ == "__main__":
    main()
