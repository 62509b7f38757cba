"""`@fusion.fuse` on a method: every layer of the class shares one compiled graph, each with its own weights."""

import torch
from torch import Tensor, nn

import fusion


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    @fusion.fuse(target="ascend910_93", verify=True)  # verify: the first call is compared with the plain graph
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


def main() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(FeedForward(256, 512) for _ in range(4))).bfloat16().eval()
    x = torch.randn(2, 16, 256, dtype=torch.bfloat16)
    with torch.inference_mode():
        print(f"four fused layers: {tuple(layers(x).shape)}, verified against the plain graph")

    @fusion.fuse  # bare, on a function; the target is this machine's
    def normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    print(f"a fused function: root mean square {normed(x.float()).square().mean().sqrt():.6f}")


if __name__ == "__main__":
    main()
