"""A first fusion: an attention block in plain PyTorch, explained, run fused, and compared with itself."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion

HEADS, HEAD, HIDDEN, LENGTH = 8, 64, 512, 32


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).view(*x.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return self.after(x)


def tables() -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** -(torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.outer(torch.arange(LENGTH), frequencies).repeat(1, 2)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def main() -> None:
    torch.manual_seed(0)
    model = Block().bfloat16().eval()
    inputs = (torch.randn(1, LENGTH, HIDDEN, dtype=torch.bfloat16), *tables())
    with torch.no_grad():
        print(
            fusion.explain(model, *inputs, options={"target": "ascend910_93"})
        )  # nothing runs: what fuses, and why not
        fused = torch.compile(model, backend="cann_fusion", options={"target": "ascend910_93"})
        difference = (fused(*inputs) - model(*inputs)).abs().max().item()
    print(f"largest difference between the fused and the plain block: {difference:.3g} (bfloat16)")


if __name__ == "__main__":
    main()
