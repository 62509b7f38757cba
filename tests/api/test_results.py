"""What a caller holds after a compiled call: strides and memory of the results are those of the plain call."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion import FusionPass, explain
from fusion.graph.aliasing import memory_of, outputs, sharing
from tests.engine.graphs import fused, memory, norm, numbers, rotate, traced

X, COS, SIN = numbers(2, 8, 256), numbers(8, 64, seed=1), numbers(8, 64, seed=2)
Y, W = numbers(4, 64, seed=3), numbers(64, seed=4)
CACHE, ROWS = numbers(2, 9, 3, 64, seed=5), numbers(2, 3, 2, 64, seed=6)
PLACES = torch.tensor([7, 0])


def heads(x: Tensor, size: int = 64) -> Tensor:
    return x.view(*x.shape[:2], -1, size).transpose(1, 2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotation that joins its halves: contiguous, whatever lies below."""
    a, b = heads(x).chunk(2, -1)
    c, s = cos[..., :32], sin[..., :32]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def several_views(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    r = turned(x, cos, sin)
    return r, r[:, :2], r.view(2, 4, 512), r.split(2, 1)[1], r.transpose(0, 1).unbind(2)[3]


def scattered_over_zeros(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    filled = torch.select_scatter(torch.zeros(4, 1, 64), x, 1, 0)
    x.add_(1)
    return filled, norm(y, w)


def scattered_result(y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    n = norm(y, w)
    return torch.select_scatter(torch.zeros(4, 1, 64), n, 1, 0), n


def written_and_read(cache: Tensor, places: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    cache.transpose(1, 2).index_copy_(2, places, rows)
    return cache * 2, rows + 1


def rolled(cache: Tensor, new: Tensor) -> Tensor:
    """What is returned of a cache in columns is seen after it was written."""
    for _ in range(3):
        cache.copy_(torch.cat((cache[:, :, new.shape[2] :], new), dim=2))
    return cache[:, 1:]


def copied_cache(cache: Tensor, places: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    new = cache.transpose(1, 2).index_copy(2, places, rows)
    return new, new[:, 1]


def returned_and_written_back(cache: Tensor, places: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    new = cache.index_copy(1, places, rows.transpose(1, 2))
    cache.copy_(new)
    return (new,)


def projected(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> tuple[Tensor, ...]:
    linear = torch.nn.functional.linear
    return heads(linear(x, wq)), heads(linear(x, wk)), linear(x, wv)


def attended(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = rotate(heads(x), cos, sin)
    return torch.nn.functional.scaled_dot_product_attention(q, q, heads(x), is_causal=True)


def joined_behind_mask(x: Tensor) -> Tensor:
    q, kv = heads(x), heads(x)[:, :2, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 4, -1, 64)
    o = torch.nn.functional.scaled_dot_product_attention(q, kv, kv, attn_mask=torch.ones(2, 2, dtype=torch.bool).tril())
    return o.transpose(1, 2).flatten(2)


def viewed_twice(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Views of a view, none of which the heads as they lie now allow."""
    r = rotate(heads(x).contiguous(), cos, sin)
    return r, r.view(-1, 64).view(4, -1), r.view(-1, 64).view(-1).view(-1, 8)


def joined(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Heads joined by a copy, which an attention that gives them side by side makes needless: once."""
    q = rotate(heads(x), cos, sin)
    o = ((q @ q.mT * 64**-0.5).softmax(-1) @ heads(x)).transpose(1, 2)
    return o.flatten(2), o.contiguous(), o[:1].contiguous()


PARAMETERS = [torch.nn.Parameter(numbers(256, 256, seed=7 + n), requires_grad=False) for n in range(3)]
CASES: dict[str, tuple[Callable[..., Any], Sequence[Tensor]]] = {
    "contiguous": (turned, (X, COS, SIN)),
    "one token": (turned, (X[:, :1], COS[:1], SIN[:1])),
    "one head": (turned, (X[..., :64], COS, SIN)),
    "elementwise": (lambda *a: turned(*a) + 1, (X, COS, SIN)),
    "several views": (several_views, (X, COS, SIN)),
    "by address": (lambda *a: turned(*a).as_strided((4, 4), (2, 1), 3), (X, COS, SIN)),
    "strided as its input": (lambda x, c, s: (rotate(heads(x), c, s), heads(x)), (X, COS, SIN)),
    "expanded": (lambda y, w: norm(y, w).unsqueeze(0).expand(3, 4, 64), (Y, W)),
    "twice": (lambda y, w: (norm(y, w), norm(y, w)), (Y, W)),
    "twice and a view": (lambda y, w: (norm(y, w), n := norm(y, w), n.detach()), (Y, W)),
    "twice and a column": (lambda y, w: (norm(y, w), n := norm(y, w), n.mT.unbind(1)[2], n.split(2)[1]), (Y, W)),
    "twice and repeated": (lambda y, w: (norm(y, w), n := norm(y, w).expand(3, 4, 64), n[:, 1:], n[0]), (Y, W)),
    "the same twice": (lambda y, w: (norm(y, w),) * 2, (Y, W)),
    "an alias": (lambda y, w: (n := norm(y, w), n.view(-1), n.t()), (Y, W)),
    "beside an input": (lambda y, w: (norm(y, w), y, y[1:], w.view(8, 8)), (Y, W)),
    "a scatter": (scattered_over_zeros, (numbers(4, 64, seed=11), Y, W)),
    "a scatter of a result": (scattered_result, (Y, W)),
    "a strided cache": (written_and_read, (CACHE, PLACES, ROWS)),
    "a rolled cache in columns": (rolled, (numbers(2, 3, 64, 8).mT, numbers(2, 3, 2, 64))),
    "a copy of a strided cache": (copied_cache, (CACHE, PLACES, ROWS)),
    "written back": (returned_and_written_back, (CACHE, PLACES, ROWS)),
    "projections": (projected, (X, *PARAMETERS)),
    "attention": (attended, (X, COS, SIN)),
    "views of views": (viewed_twice, (X, COS, SIN)),
    "heads in order again": (
        lambda x, c, s: rotate(heads(x).contiguous(), c, s).transpose(1, 2).contiguous(),
        (X[:1], COS, SIN),
    ),
    "joined heads": (lambda *a: joined(*a)[0], (X, COS, SIN)),
    "joined heads twice": (joined, (X, COS, SIN)),
    "joined heads of some": (lambda *a: joined(*a)[2], (X, COS, SIN)),
    "joined heads of one sequence": (joined_behind_mask, (X[:1, :2],)),
    "with gaps": (lambda *a: turned(*a).new_zeros(2, 4, 8, 80)[..., :64].copy_(turned(*a)), (X, COS, SIN)),
    "memory with gaps": (
        lambda *a: torch.empty_strided((2, 4, 8, 64), (2560, 640, 80, 1)).copy_(turned(*a)),
        (X, COS, SIN),
    ),
    "top-k": (lambda y: (*(t := y.softmax(-1).topk(8)), t.values[:, :2], t.indices[:2]), (Y,)),
}


def copies(args: Sequence[Tensor]) -> list[Tensor]:
    return [each if isinstance(each, torch.nn.Parameter) else each.clone() for each in args]


def telling(x: Tensor) -> list[int]:
    """The strides but of dims of size 1, which Inductor gives as it likes."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]


def compare(function: Callable[..., Any], args: Sequence[Tensor], **options: Any) -> None:
    plain, mine = copies(args), copies(args)
    torch.compiler.reset()
    with torch.no_grad():
        want = function(*plain)
        have = torch.compile(function, backend="cann_fusion", options=options)(*mine)
    want, have = ((each,) if isinstance(each, Tensor) else tuple(each) for each in (want, have))
    for one, other in zip((*have, *mine), (*want, *plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    lies = telling if options["lower"] == "inductor" else Tensor.stride
    assert list(map(lies, have)) == list(map(lies, want))
    assert memory(*mine, *have) == memory(*plain, *want)


@pytest.mark.rotates(12)
@pytest.mark.parametrize("target", ["host", "ascend910_93"])
@pytest.mark.parametrize("name", CASES)
def test_results_lie_as_without_a_compiler(name, target):
    compare(*CASES[name], target=target, lower="eager")


@pytest.mark.rotates(3)
def test_results_of_symbolic_sizes_lie_as_without_a_compiler():
    def einsummed(q: Tensor, k: Tensor) -> Tensor:
        weights = (q @ k.transpose(2, 3) / 8).softmax(-1)
        return torch.einsum("bhst,bhtd->bhsd", weights, k)

    torch.compiler.reset()
    run = torch.compile(einsummed, backend="cann_fusion", options={"target": "host", "lower": "eager"})
    for batch, queries in ((1, 2), (3, 4)):
        q, k = numbers(batch, 2, queries, 64), numbers(batch, 2, 5, 64, seed=1)
        torch._dynamo.maybe_mark_dynamic(q, 2)
        with torch.no_grad():
            have, want = run(q, k), einsummed(q, k)
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
        assert telling(have) == telling(want)


@pytest.mark.rotates(8)
def test_results_lie_as_without_a_compiler_by_inductor():
    """All of them in one graph, which costs one compilation; but those for which a plain Inductor shares memory too."""
    kept = [each for name, each in CASES.items() if not name.startswith("twice") and name != "written back"]
    flat = [each for _, args in kept for each in copies(args)]
    ends = torch.tensor([len(args) for _, args in kept]).cumsum(0).tolist()

    def together(*given: Tensor) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        for (function, args), end in zip(kept, ends, strict=True):
            found = function(*given[end - len(args) : end])
            results.extend((found,) if isinstance(found, Tensor) else found)
        return tuple(results)

    compare(together, flat, target="host", lower="inductor")


def test_what_is_copied_for_the_caller_is_counted():
    args = (X, COS, SIN)
    _, kept = fused(lambda *a: turned(*a).sum(), *args)
    _, returned = fused(turned, *args)
    assert [each.match.rule.name for each in returned.chosen] == [each.match.rule.name for each in kept.chosen]
    one, other = (each.chosen[0].launches for each in (kept, returned))
    assert one - other == 1


def test_a_guest_gives_what_the_graph_gave():
    gm = traced(several_views, X, COS, SIN)
    before = [each.meta["val"].stride() for each in outputs(gm.graph)], sharing(gm.graph)
    FusionPass({"target": "host"})(gm)
    assert any("npu" in str(node.target) for node in gm.graph.nodes)
    assert ([each.meta["val"].stride() for each in outputs(gm.graph)], sharing(gm.graph)) == before
    assert len({memory_of(each) for each in outputs(gm.graph)}) == 1


def test_the_report_says_how_many_copies_are_for_the_caller():
    report = explain(turned, X, COS, SIN, options={"target": "host"})
    assert json.loads(report.to_json())["result_copies"] == 1
    assert "copies so that results lie in memory as those of the model do: 1" in str(report)
    summed = explain(lambda *a: turned(*a).sum(), X, COS, SIN, options={"target": "host"})
    assert json.loads(summed.to_json())["result_copies"] == 0
