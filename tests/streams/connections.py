"""A whole hyper-connection, gates before a layer and the update behind it, as several code bases spell it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N, D = 4, 32
COUNT = N * N + 2 * N
HC_EPS, NORM_EPS = 1e-6, 1e-5
Form = Callable[..., Tensor]


def layer(x: Tensor) -> Tensor:
    """What stands for attention, or for experts."""
    return torch.tanh(x)


class Connection(nn.Module):
    """The Parameters of a connection around `layer`, and the form in which it is written."""

    def __init__(self, form: Form, phi: torch.dtype = torch.float32, times: int = 20, n: int = N, d: int = D) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        count = n * n + 2 * n
        shapes = ((count, n * d), (3,), (count,), (n * d,))
        scales = ((n * d) ** -0.5, 0.7, 0.5, 0.2)
        made = [torch.randn(*shape, generator=generator) * by for shape, by in zip(shapes, scales, strict=True)]
        made[3] = made[3] + 1
        self.fn, self.scale, self.base, self.gamma = (nn.Parameter(each, requires_grad=False) for each in made)
        self.fn.data = self.fn.data.to(phi)
        self.parts = nn.ParameterList(
            nn.Parameter(each.clone(), requires_grad=False) for each in self.fn.data.split([n, n, n * n])
        )
        self.form, self.times, self.n = form, times, n

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x)


def balanced(matrix: Tensor, times: int, eps: float = HC_EPS) -> Tensor:
    """Columns, then rows and columns in turns."""
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(times - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    return matrix


def with_matmul(x: Tensor, post: Tensor, comb: Tensor, out: Tensor) -> Tensor:
    """The update in the dtype of the streams."""
    to = x.dtype
    return post.to(to).unsqueeze(-1) * out.unsqueeze(-2) + torch.matmul(comb.to(to).transpose(-1, -2), x)


def transformers(m: Connection, x: Tensor) -> Tensor:
    """transformers: DeepSeek-V4, GLM-5-Next."""
    hc = m.n
    flat = x.view(*x.shape[:2], -1).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + NORM_EPS)
    pre_w, post_w, comb_w = F.linear(flat, m.fn.float()).split([hc, hc, hc * hc], dim=-1)
    pre_b, post_b, comb_b = m.base.split([hc, hc, hc * hc])
    pre_s, post_s, comb_s = m.scale.unbind(0)
    pre = torch.sigmoid(pre_w * pre_s + pre_b) + HC_EPS
    post = 2 * torch.sigmoid(post_w * post_s + post_b)
    logits = comb_w.view(*comb_w.shape[:-1], hc, hc) * comb_s + comb_b.view(hc, hc)
    comb = balanced(torch.softmax(logits, dim=-1) + HC_EPS, m.times)
    return with_matmul(x, post, comb, layer((pre.unsqueeze(-1) * x).sum(dim=2).to(x.dtype)))


def split_by_index(m: Connection, mixes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gates of products [.., N² + 2 N], by slices."""
    n = m.n
    pre = torch.sigmoid(mixes[..., :n] * m.scale[0] + m.base[:n]) + HC_EPS
    post = 2 * torch.sigmoid(mixes[..., n : 2 * n] * m.scale[1] + m.base[n : 2 * n])
    comb = (mixes[..., 2 * n :] * m.scale[2] + m.base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + HC_EPS
    return pre, post, balanced(comb, m.times)


def inference(m: Connection, x: Tensor) -> Tensor:
    """DeepSeek's own inference code: the norm behind the product, streams mixed by a sum, in float32."""
    flat = x.flatten(2).float()
    rsqrt = torch.rsqrt(flat.square().mean(-1, keepdim=True) + NORM_EPS)
    pre, post, comb = split_by_index(m, F.linear(flat, m.fn.float()) * rsqrt)
    out = layer(torch.sum(pre.unsqueeze(-1) * flat.view(x.shape), dim=2).to(x.dtype))
    y = post.unsqueeze(-1) * out.unsqueeze(-2) + torch.sum(comb.unsqueeze(-1) * x.unsqueeze(-2), dim=2)
    return y.type_as(out)


def flat_tokens(m: Connection, x: Tensor) -> Tensor:
    """Ports of its kernel: gates of one dim of all tokens, viewed back."""
    flat, (b, s, n, _) = x.flatten(2).float(), x.shape
    mixes = (F.linear(flat, m.fn.float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + NORM_EPS)).view(
        b * s, -1
    )
    pre, post, comb = split_by_index(m, mixes)
    pre, post, comb = pre.view(b, s, n), post.view(b, s, n), comb.view(b, s, n, n)
    out = layer((pre.unsqueeze(-1) * x).sum(2).to(x.dtype))
    return (post.unsqueeze(-1) * out.unsqueeze(-2) + (comb.unsqueeze(-1) * x.unsqueeze(-2)).sum(2)).to(x.dtype)


def one_vector(m: Connection, x: Tensor) -> Tensor:
    """SGLang: one vector of scales, a sum of squares, gates [T, N, 1]."""
    n, outer = m.n, x.shape[:2]
    streams = x.flatten(0, 1)
    flat = streams.flatten(-2, -1).float()
    sums = flat.square().sum(-1)
    mixes = flat @ m.fn.float().T * (sums.unsqueeze(-1) / m.fn.shape[-1] + NORM_EPS).rsqrt()
    scale = torch.cat([m.scale[0].expand(n), m.scale[1].expand(n), m.scale[2].expand(n * n)])
    mixes = mixes * scale + m.base
    pre = mixes[:, :n].sigmoid().unsqueeze(-1) + HC_EPS
    post = (mixes[:, n : 2 * n].sigmoid() * 2.0).unsqueeze(-1)
    comb = balanced(mixes[:, 2 * n :].view(-1, n, n).softmax(-1) + HC_EPS, m.times)
    out = layer((streams * pre).sum(-2).to(x.dtype))
    mixed = torch.einsum("tij,tid->tjd", comb, streams.float())
    return (mixed + post * out.float().unsqueeze(1)).to(x.dtype).unflatten(0, outer)


def three_layers(m: Connection, x: Tensor) -> Tensor:
    """The pseudo-code of the paper: a projection for each gate, the norm before."""
    n = m.n
    flat = F.rms_norm(x.flatten(-2).float(), (m.fn.shape[-1],), eps=NORM_EPS)
    parts = [F.linear(flat, each.float()) for each in m.parts]
    biases = m.base.split([n, n, n * n])
    pre, post, comb = (m.scale[k] * parts[k] + biases[k] for k in range(3))
    comb = balanced(comb.unflatten(-1, (n, n)).softmax(-1) + HC_EPS, m.times)
    pre = pre.sigmoid() + HC_EPS
    out = layer((pre.unsqueeze(-2) @ x.float()).squeeze(-2).to(x.dtype))
    return (2 * post.sigmoid().unsqueeze(-1) * out.unsqueeze(-2) + comb.mT @ x.float()).to(x.dtype)


def einsums(m: Connection, x: Tensor) -> Tensor:
    """Contractions as einsum, streams normalised over both dims before they are flattened."""
    h = x.float()
    unit = h * torch.rsqrt(h.pow(2).mean((-2, -1), keepdim=True) + NORM_EPS)
    mixes = torch.einsum("bsk,gk->bsg", unit.flatten(2), m.fn.float())
    pre, post, comb = split_by_index(m, mixes)
    out = layer(torch.einsum("bsn,bsnd->bsd", pre, h).to(x.dtype))
    y = torch.einsum("bsn,bsd->bsnd", post, out.float()) + torch.einsum("bsij,bsid->bsjd", comb, h)
    return y.to(x.dtype)


def gain(m: Connection, x: Tensor) -> Tensor:
    """torchtitan-npu: a gain of the norm."""
    flat = x.flatten(2).float()
    rsqrt = torch.rsqrt(flat.square().mean(-1, keepdim=True) + NORM_EPS)
    pre, post, comb = split_by_index(m, F.linear(flat * rsqrt * m.gamma.unsqueeze(0), m.fn.float()))
    return with_matmul(x, post, comb, layer((pre.unsqueeze(-1) * x).sum(2).to(x.dtype)))


def without_first_eps(m: Connection, x: Tensor) -> Tensor:
    """torchtitan-npu: no eps at the gates of the collapse."""
    flat = x.flatten(2).float()
    mixes = F.linear(flat, m.fn.float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + NORM_EPS)
    pre, post, comb = split_by_index(m, mixes)
    pre = torch.sigmoid(mixes[..., : m.n] * m.scale[0] + m.base[: m.n])
    return with_matmul(x, post, comb, layer((pre.unsqueeze(-1) * x).sum(2).to(x.dtype)))


def turned(m: Connection, x: Tensor) -> Tensor:
    """A matrix that mixes by its rows: another connection, with the transposed matrix."""
    flat = x.flatten(2).float()
    mixes = F.linear(flat, m.fn.float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + NORM_EPS)
    pre, post, comb = split_by_index(m, mixes)
    out = layer((pre.unsqueeze(-1) * x).sum(2).to(x.dtype))
    return (post.unsqueeze(-1) * out.unsqueeze(-2) + torch.matmul(comb, x.float())).to(x.dtype)


FORMS: tuple[Form, ...] = (transformers, inference, flat_tokens, one_vector, three_layers, einsums, turned)
"""Forms that become all three operators of every chip."""
FORMS_950: tuple[Form, ...] = (gain, without_first_eps)
"""Forms that become those of Ascend 950 alone."""
