"""What is read as attention over a latent in int8, also with rounded weights, and what is one step away from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.frontend.library import installed
from fusion.graph import Graph, Reading
from fusion.stages.canonicalise import canonicalise
from fusion.stages.read import read
from fusion.testing import capture
from tests.analysis.test_lanes import computed

B, N, S, T, C, R = 2, 3, 2, 5, 8, 4
HEADS, SEQUENCES = torch.arange(1.0, N + 1)[:, None, None] / 2**12, torch.arange(1.0, B + 1)[:, None, None, None]
WHOLE, ROUNDED = "int8_latent_attention", "int8_probability_attention"


def understood(
    form: Callable[..., Tensor], inputs: Sequence[Tensor], dynamic: bool = False
) -> tuple[Graph, dict[str, Tensor]]:
    """The graph with its readings, and its inputs by name."""
    captured = capture(form, inputs, "composite", dynamic=dynamic)
    graph, failures = read(canonicalise(captured.graph.graph, captured.facts), installed().readers)
    assert not failures
    names = [node.name for node in captured.graph.graph.nodes if node.op == "placeholder"]
    return graph, dict(zip(names, captured.inputs, strict=True))


def claimed(graph: Graph, inputs: dict[str, Tensor], attention: Reading) -> Tensor:
    """What a reading of one of both kinds stands for."""
    given = {value: inputs[value.attrs[0]] for value in graph.places if value.op == "input"}

    def of(name: str) -> Tensor:
        value = attention.captures.get(name)
        return torch.ones(()) if value is None else computed(value, given).float()

    said, query, latent = attention.captures, of("query"), of("latent")
    both = torch.cat((query, of("rope")), -1) @ torch.cat((latent, of("k_rope")), -1).mT
    by = of("of_values") * said["values_by"]
    if attention.op == WHOLE:
        scores = both * of("tokens") * of("of_keys") * said["keys_by"] * said["scale"]
        return scores.softmax(-1) @ latent * by
    products = query @ latent.mT
    scores = (both + products * (of("of_scores")[:, None, None] - 1)) * said["scale"]
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    return (shares * 127).round() / 127 @ latent * by.reshape(-1, 1, 1) / shares.sum(-1, keepdim=True)


def is_claimed(name: str, form: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    graph, given = understood(form, inputs)
    [(_, attention)] = graph.readings.all(WHOLE, ROUNDED)
    assert attention.op == name
    torch.testing.assert_close(claimed(graph, given, attention), form(*inputs), rtol=1e-2, atol=1e-2)


def is_told(
    name: str, form: Callable[..., Tensor], inputs: Sequence[Tensor], reason: str, dynamic: bool = False
) -> None:
    """Why it is nothing of this kind; "" for nothing."""
    found = understood(form, inputs, dynamic)[0].readings
    assert not found.all(name)
    reasons = [each.reason for _, each in found.missed(name)]
    assert any(reason in each for each in reasons) if reason else not reasons


def whole(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def inputs(heads: int = 1, rope_heads: int = 1, dtypes: str = "float32 float32") -> tuple[Tensor, ...]:
    """Queries in int8 with a scale of each, those rotated; a latent in int8, rotated keys, the scale of the latent."""
    torch.manual_seed(0)
    of_rope, of_keys = (getattr(torch, each) for each in dtypes.split())
    queries = whole(B, N, S, C), torch.rand(B, N, S, 1) / 128, torch.randn(B, N, S, R, dtype=of_rope)
    return *queries, whole(B, heads, T, C), torch.randn(B, rope_heads, T, R, dtype=of_keys), torch.rand(1) / 128


def attended(q: Tensor, keys: list[Tensor], values: Tensor) -> Tensor:
    k = torch.cat([each.expand(-1, max(each.shape[1] for each in keys), -1, -1) for each in keys], dim=-1)
    return (q @ k.mT * 0.125).softmax(-1) @ values


def joined(numbers: Tensor, tokens: Tensor, rope: Tensor) -> Tensor:
    return torch.cat((numbers.float() * tokens, rope.float()), dim=-1)


def plain(numbers, tokens, rope, latent, k_rope, scale):
    keys = latent.float() * scale
    return attended(joined(numbers, tokens, rope), [keys, k_rope.float()], keys)


def of_three(numbers, tokens, rope, latent, k_rope, scale):
    """Keys have lanes of another int8 tensor besides."""
    keys, other = latent.float() * scale, latent.flip(2).float() * scale
    return attended(
        torch.cat((joined(numbers, tokens, rope), numbers.float()), -1), [keys, k_rope.float(), other], keys
    )


def keys_by_row(numbers, tokens, rope, latent, k_rope, scale):
    keys = latent.float() * torch.arange(1.0, T + 1)[:, None] * scale
    return attended(joined(numbers, tokens, rope), [keys, k_rope.float()], latent.float() * scale)


def values_by_row(numbers, tokens, rope, latent, k_rope, scale):
    values = latent.float() * torch.arange(1.0, T + 1)[:, None] * scale
    return attended(joined(numbers, tokens, rope), [latent.float() * scale, k_rope.float()], values)


def packed(numbers, tokens, rope, latent, k_rope, scale):
    """Queries are joined as rows of tokens, heads behind them."""
    rows = (each.transpose(1, 2).flatten(0, 1) for each in (numbers, tokens, rope))
    keys = latent.float() * scale
    return attended(joined(*rows).view(B, S, N, C + R).transpose(1, 2), [keys, k_rope.float()], keys)


def other_values(numbers, tokens, rope, latent, k_rope, scale):
    keys = latent.float() * scale
    return attended(joined(numbers, tokens, rope), [keys, k_rope.float()], latent.flip(2).float() * scale)


def multiplied(of_rope: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Factors are behind the products; rotated queries have some of them before."""

    def form(numbers, tokens, rope, latent, k_rope, scale):
        turned = of_rope(rope.float(), tokens)
        scores = (numbers.float() @ latent.float().mT + turned @ k_rope.float().mT) * tokens * scale
        return (scores * 0.125).softmax(-1) @ (latent.float() * scale)

    return form


thrice = multiplied(lambda rope, tokens: rope * tokens / tokens * tokens)
to_the_zeroth = multiplied(lambda rope, tokens: rope * tokens**0)


@pytest.mark.parametrize(
    ("form", "dtypes"),
    [
        (plain, "bfloat16 bfloat16"),
        (packed, "bfloat16 bfloat16"),
        (thrice, "float32 float32"),
        (to_the_zeroth, "float32 float32"),
    ],
)
def test_what_is_attention_over_whole_numbers(form: Callable[..., Tensor], dtypes: str):
    is_claimed(WHOLE, form, inputs(dtypes=dtypes))


ROWS, DTYPES = "there is one of each token", "their dtypes differ, or heads have rotated"


@pytest.mark.parametrize(
    ("form", "args", "reason"),
    [
        (plain, {"heads": N}, ""),
        (plain, {"rope_heads": N}, DTYPES),
        (plain, {"dtypes": "float16 bfloat16"}, DTYPES),
        (of_three, {}, ""),
        (keys_by_row, {}, ROWS),
        (values_by_row, {}, ROWS),
        (other_values, {}, ""),
    ],
)
def test_what_is_one_step_away_from_it(form: Callable[..., Tensor], args: dict[str, Any], reason: str):
    is_told(WHOLE, form, inputs(**args), reason)


def biased(numbers, tokens, rope, latent, k_rope, scale):
    keys = latent.float() * scale
    scores = joined(numbers, tokens, rope) @ torch.cat((keys, k_rope.float()), -1).mT * 0.125
    return (scores - torch.arange(T) / 8).softmax(-1) @ keys


def lowered(numbers, tokens, rope, latent, k_rope, scale):
    """By numbers that hide no key alone, and are exact as a bias of floats."""
    keys = latent.float() * scale
    scores = joined(numbers, tokens, rope) @ torch.cat((keys, k_rope.float()), -1).mT * 0.125
    return (scores + torch.full((S, T), -1e4).triu()).softmax(-1) @ keys


@pytest.mark.parametrize("form", [biased, lowered])
def test_it_takes_no_bias_and_is_read_in_floats_with_one(form: Callable[..., Tensor]):
    found = understood(form, inputs())[0].readings
    assert not found.all("int8_latent_attention")
    [(_, attention)] = found.all("softmax_attention")
    assert "bias" in attention.captures


def scored_by(more: Callable[[Tensor], Tensor | float]) -> Callable[..., Tensor]:
    """Scores with a factor of each head, and one more of the int8 products."""

    def score(numbers, tokens, rope, latent, k_rope, scale):
        products = numbers.float() @ latent.float().mT * HEADS * more(tokens)
        return (products + rope.float() @ k_rope.float().mT) * 0.125

    return score


scored = scored_by(lambda tokens: 1.0)


def exponentials(scores: Tensor) -> Tensor:
    return (scores - scores.amax(-1, keepdim=True)).exp()


def steps(shares: Tensor) -> Tensor:
    return (shares * 127).round()


def weighed(
    of_scores: Callable[[Tensor], Tensor] = exponentials,
    rounded: Callable[[Tensor], Tensor] = steps,
    by: Callable[[Tensor], Tensor] = lambda scale: scale / 127,
    score: Callable[..., Tensor] = scored,
) -> Callable[..., Tensor]:
    """Exponentials of scores, rounded, over values in int8; the result is divided by their sum and multiplied."""

    def form(*args):
        shares, latent = of_scores(score(*args)), args[3]
        return rounded(shares) @ latent.float() * by(args[-1]) / shares.sum(-1, keepdim=True)

    return form


def of_float_keys(numbers, tokens, rope, latent, k_rope, scale):
    return rope.float() @ k_rope.float().mT


def without_softmax(weigh: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Floats times the latent."""
    return lambda numbers, tokens, rope, latent, *rest: weigh(rope.repeat(1, 1, 1, 2)[..., :T]) @ latent.float()


def over_floats(*args: Tensor) -> Tensor:
    return steps(scored(*args).softmax(-1)) @ args[4]


@pytest.mark.parametrize("rounded", [steps, lambda shares: steps(shares).clamp(0, 127).to(torch.int8).float()])
@pytest.mark.parametrize("by", [lambda scale: 1 / 127, lambda scale: HEADS / 127, lambda scale: HEADS * scale])
def test_what_is_attention_with_rounded_weights(rounded: Callable[[Tensor], Tensor], by: Callable[[Tensor], Any]):
    is_claimed(ROUNDED, weighed(rounded=rounded, by=by), inputs())


OF_SCORES = "the int8 product is multiplied by more than"
LOST, SHARES = "what is rounded is not exp(s - max s) of a row", "shares of the softmax are rounded"
OF_HEADS = "it is multiplied by something else than"


@pytest.mark.rotates(8)
@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (weighed(rounded=lambda shares: steps(shares).clamp(0, 100)), ""),
        (weighed(rounded=lambda shares: steps(shares).clamp(1, 127)), ""),
        (weighed(rounded=lambda shares: steps(shares * HEADS)), SHARES),
        (weighed(torch.exp), LOST),
        (weighed(lambda s: (s - s.amax(-1, keepdim=True) * 2).exp()), LOST),
        (weighed(lambda s: (s - s.amin(-1, keepdim=True)).exp()), LOST),
        (weighed(lambda s: (s - s.mean(-1, keepdim=True)).exp()), LOST),
        (weighed(lambda s: (s - s.amax(-2, keepdim=True)).exp()), LOST),
        (weighed(lambda s: (s - s.flip(1).amax(-1, keepdim=True)).exp()), LOST),
        (weighed(score=scored_by(lambda tokens: SEQUENCES)), OF_SCORES),
        (weighed(score=scored_by(lambda tokens: tokens * 0.5)), OF_SCORES),
        (weighed(by=lambda scale: SEQUENCES / 127), OF_HEADS),
        (weighed(by=lambda scale: SEQUENCES), OF_HEADS),
        (weighed(by=lambda scale: SEQUENCES * (scale + HEADS)), OF_HEADS),
        (weighed(score=of_float_keys), ""),
        (over_floats, ""),
        (without_softmax(lambda x: x), ""),
        (without_softmax(lambda x: x.exp().relu()), ""),
        (without_softmax(steps), ""),
        (without_softmax(lambda x: (x * 127).to(torch.int8).float()), ""),
    ],
)
def test_what_is_one_step_away_from_rounded_weights(form: Callable[..., Tensor], reason: str):
    is_told(ROUNDED, form, inputs(), reason)


@pytest.mark.rotates(6)
def test_keys_whose_number_is_not_known():
    is_told(ROUNDED, weighed(), inputs(), "their number is not a static size", dynamic=True)
