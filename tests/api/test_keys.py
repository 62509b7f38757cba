"""Passes and reports as data: keys for caches of compiled graphs, pickles and copies."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import fusion
from fusion import operators
from fusion.frontend import passes
from fusion.frontend.library import installed
from fusion.graph.origin import render
from tests.engine.graphs import norm, numbers
from tests.support.child import child

HOST = {"target": "host"}
RULE = '''
    from dataclasses import dataclass
    import torch
    from fusion import Rule, lowering, pattern, tensor

    @dataclass(frozen=True)
    class Cubed(Rule):
        """y = x · x · x."""

        def reference(self, x):
            """Multiply x by itself twice."""
            return x * x * x

        @pattern
        def written(self, p, x=tensor("*B D")):
            """Two products."""
            return x * x * x

        @lowering
        def run(self, x):
            """One power."""
            return torch.pow(x, 3)
'''
COMPILES = """
    import sys, torch, fusion
    from torch._dynamo.utils import counters
    sys.path.insert(0, {folder!r})
    import cubed
    guest = fusion.FusionPass({options!r}, rules=[cubed.Cubed()])
    options = {{"post_grad_custom_pre_pass": guest, "fallback_by_default": True}}
    run = torch.compile(lambda x: x * x * x, options=options)
    x = torch.arange(6.0).reshape(2, 3)
    with torch.no_grad():
        assert torch.equal(run(x), x * x * x)
    kinds = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
    print(*(counters["inductor"][each] for each in kinds))
"""
HIT, MISS = [1, 0, 0], [0, 1, 0]


@pytest.mark.rotates(8)
def test_a_pass_is_one_of_inductor():
    assert issubclass(fusion.FusionPass, CustomGraphPass)


def compiles(**options: str) -> list[int]:
    torch.compiler.reset()
    counters.clear()
    given = {"post_grad_custom_pre_pass": fusion.FusionPass({**HOST, **options}), "fallback_by_default": True}
    with torch.no_grad():
        torch.compile(norm, options=given)(numbers(3, 64), numbers(64))
    return [counters["inductor"][f"fxgraph_cache_{each}"] for each in ("hit", "miss", "bypass")]


@pytest.mark.rotates(8)
def test_inductor_finds_what_an_equal_pass_gave_and_nothing_else():
    with fresh_cache():
        assert [compiles(), compiles(), compiles(disable="rope")] == [MISS, HIT, MISS]


@pytest.mark.rotates
def test_a_second_process_hits_until_an_option_or_the_code_of_a_rule_changes(tmp_path: Path):
    module = tmp_path / "cubed.py"

    def process(**options: int) -> list[int]:
        source = COMPILES.format(folder=str(tmp_path), options={**HOST, **options})
        done = child(source, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), PYTHONDONTWRITEBYTECODE="1")
        return list(map(int, done.stdout.split()))

    def write(text: str) -> None:
        module.write_text("\n".join(line[4:] for line in text.splitlines()))

    write(RULE)
    assert [process(), process(), process(fuel=3), process()] == [MISS, HIT, MISS, HIT]
    write(RULE.replace("torch.pow(x, 3)", "torch.pow(x, 2) * x"))
    assert [process(), process()] == [MISS, HIT]


def test_the_key_follows_the_versions(monkeypatch: pytest.MonkeyPatch):
    keys = {fusion.FusionPass(HOST).uuid()}
    monkeypatch.setattr(passes, "torch", SimpleNamespace(__version__="2.14.0"))
    keys.add(fusion.FusionPass(HOST).uuid())
    monkeypatch.setattr(operators, "ensure", lambda: operators.Origin("torch_npu", "it is imported", "2.14.0"))
    keys.add(fusion.FusionPass(HOST).uuid())
    assert len(keys) == 3


@pytest.mark.parametrize("rules", [None, installed().rules[:3], installed()], ids=["installed", "rules", "library"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["copy", "pickle"]
)
def test_copies_of_a_pass_are_equal(rules, copied):
    guest = fusion.FusionPass({**HOST, "disable": "layer_norm"}, rules)
    again = copied(guest)
    assert again.uuid() == guest.uuid()
    assert again.options == guest.options
    assert again.library == guest.library


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(64))
        self.gate, self.up = (nn.Linear(64, 96, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache.index_copy_(0, torch.tensor([1]), x[:1])
        y = norm(x, self.gain) + x.cumsum(0)
        y = F.silu(self.gate(y)) * self.up(y)
        heads = y.reshape(1, 1, *y.shape)
        return y, F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["copy", "pickle"]
)
@pytest.mark.rotates(4)
def test_copies_of_a_report_say_the_same(dynamic: bool, copied):
    report = fusion.explain(
        Model(), numbers(3, 64), numbers(8, 64), options={"target": "ascend910_93"}, dynamic=dynamic
    )
    assert report.matches
    assert report.refusals
    assert report.prepared
    again = copied(copied(report))
    assert (again.to_json(), str(again), again.ops) == (report.to_json(), str(report), report.ops)
    assert list(map(str, again.refusals)) == list(map(str, report.refusals))
    assert [render(each.graph) for each in again.graphs] == [render(each.graph) for each in report.graphs]
    assert [str(each.graph) for each in again.lowered] == [str(each.graph) for each in report.lowered]


@pytest.mark.rotates
def test_a_process_without_the_model_reads_a_report():
    report = fusion.explain(Model(), numbers(3, 64), numbers(8, 64), options={"target": "ascend910_93"})
    packed = pickle.dumps(report)
    done = child(f"""
        import pickle
        report = pickle.loads({packed!r})
        print(report.to_json())
    """)
    assert done.stdout.strip() == report.to_json()
