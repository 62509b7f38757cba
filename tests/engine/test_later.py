"""What a call reads may stand behind its result in the model: it is made once, and the call waits for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import testing
from fusion.options import Options
from fusion.testing import Trial, capture

B, N, T, D = 2, 4, 33, 64
OPTIONS = Options(target="ascend910_93", lower="eager", plan_cache="off")


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, N, T, D, generator=generator).bfloat16() for _ in range(3))
    seen = torch.arange(T) < torch.tensor([T, 9])[:, None]
    return [q, k, v, seen[:, None, None].expand(-1, 1, T, -1).contiguous()]


def hidden_later(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """A convolution of a Conformer leaves out frames that nobody sees, behind the attention."""
    y = F.scaled_dot_product_attention(q, k, v, seen)
    hidden = torch.all(~seen, dim=2)[..., None]
    return F.scaled_dot_product_attention(y.masked_fill(hidden.transpose(1, 2)[:, :1, :1], 0.0), k, v, seen)


def attentions(t: Trial) -> int:
    return sum("fused_infer" in str(each.target) for each in t.fused.graph.nodes)


def test_a_mask_that_is_turned_behind_the_attention():
    t = testing.trial_of(capture(hidden_later, tuple(inputs())), OPTIONS)
    assert not t.outcome.failures
    assert attentions(t) == 2
    testing.means_what_it_says(t)


def written_between(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """The keys are changed before what is seen is turned: attention read them as they were."""
    y = F.scaled_dot_product_attention(q, k, v, seen)
    k.mul_(2)
    return y, torch.all(~seen, dim=2)


def test_keys_that_are_changed_meanwhile():
    t = testing.trial_of(capture(written_between, tuple(inputs())), OPTIONS)
    assert not t.outcome.failures
    testing.means_what_it_says(t)
