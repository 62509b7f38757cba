"""The facet of attention over a latent that says in which numbers it lies: in floats, or in int8 with int8 queries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from fusion import Group, Target, attribute, require, scalar, tensor
from patterns.attention.calls import Parts
from patterns.cache import pages
from patterns.kit.int8_scales import scale_of
from patterns.latent import head_projection
from patterns.latent.attention.absorption_cost import Sizes, break_even


@dataclass(frozen=True)
class Encoding(Group):
    """Either; by itself one that tells no operator of scales, of a latent that the model projects nowhere."""

    first_rows = up_key = up_value = None

    def scales(self, version: int) -> dict[str, Any]:
        """What the operator is told of scales."""
        return {}

    def scales_of_heads(self) -> dict[str, Any]:
        """What atb is told of scales."""
        return {}

    def unrotated(self, values: str) -> Any:
        """Queries over a latent of which no lanes are rotated."""
        require(False, "some lanes are rotated")

    def expanded(self, y: Tensor, values: str) -> Tensor:
        """A result over the latent [B, S, N, C] times W_UV, [B, N, S, E], or as [B, N, S, C] where none follows."""
        return head_projection.expanded(y, self.up_value, values)

    def remark(self, lowering: str, machine: Target) -> str:
        """Which form was chosen, and from how many queries on the other one costs less, where there are both."""
        return ""


@dataclass(frozen=True)
class Floats(Encoding):
    """Floats, of a latent of which the model speaks as a whole.

    Attributes:
        nope, up_key: queries of heads and W_UK [N, D, C], where the model projects them in the graph.
        absorbed: the product of both.
        q_rope: the rotated lanes of the queries.
        up_value: W_UV [N, C, E], where the model expands the result in the graph.
    """

    nope: Any = tensor("B N S D", optional=True)
    q_rope: Any = tensor("B N S Dr")
    absorbed: Any = tensor("B N S C")
    up_key: Any = tensor("N D C", optional=True)
    up_value: Any = tensor("N C E", optional=True)

    def terms(self, p, source, result, said: dict[str, Any], word: str = "softmax_attention") -> Any:
        """The results of a form; `word` is what reads as attention of these queries, keys and values."""
        latent, k_rope = source.latent_terms(p)
        k = p.latent_keys(latent=latent, rope=k_rope, up=self.up_key, rows=self.first_rows)
        q = p.latent_queries(nope=self.nope, rope=self.q_rope, absorbed=self.absorbed, keys=k)
        v = p.latent_values(latent=latent, up=self.up_value)
        attended = partial(getattr(p, word), q=q, k=k, v=v, **said)
        return result.terms(attended, partial(p.softmax_lse, q=q, k=k, **said))

    def refuse_blocks(self, source: Any) -> None:
        """Refuse pages in other blocks of NZ."""
        source.refuse_blocks(pages.NZ, pages.NZ)

    def queries(self) -> Parts:
        """Queries as the model has them over the latent, and their rotated lanes."""
        return self.absorbed, self.q_rope

    def parts_of_heads(self) -> tuple[Any, Any]:
        """Queries of heads with their rotated lanes, and both projections."""
        require(self.nope is not None and self.up_value is not None, "the model itself absorbs the projections")
        return (self.nope, self.q_rope), (self.up_key, self.up_value)

    def remark(self, lowering: str, machine: Target) -> str:
        """Both forms."""
        if self.up_key is None or self.up_value is None:
            return ""
        form = "expanded" if lowering.startswith("expanded") else "absorbed"
        return _compared(form, machine, self.up_key, self.up_value, self.q_rope.shape[3])


def _compared(form: str, machine: Target, up_key: Any, up_value: Any, rope: Any) -> str:
    """Which form was chosen, and from how many queries on the other one costs less."""
    heads, width, rank = up_key.shape
    even = break_even(machine, Sizes(heads, rank, width, rope, up_value.shape[2]))
    until = f"expanding costs less from about {even} queries on" if even else "expanding never costs less"
    return f"{form}: behind a long context, on {machine.name}, {until}"


@dataclass(frozen=True)
class Plain(Floats):
    """The same where the model may speak of the first rows of the latent alone; None for all."""

    first_rows: Any = attribute()


@dataclass(frozen=True)
class Unrotated(Encoding):
    """Floats, of a latent without rotated lanes, which is keys and values of one head that all share.

    Attributes:
        as of `Floats`.
    """

    nope: Any = tensor("B N S D")
    absorbed: Any = tensor("B N S C")
    up_key: Any = tensor("N D C")
    up_value: Any = tensor("N C E")
    first_rows: Any = attribute()

    def terms(self, p, source, result, said: dict[str, Any]) -> Any:
        """The results of a form."""
        k = p.unrotated_keys(latent=source.first, up=self.up_key, rows=self.first_rows)
        q = p.unrotated_queries(nope=self.nope, absorbed=self.absorbed, keys=k)
        v = p.latent_values(latent=source.first, up=self.up_value)
        attended = partial(p.softmax_attention, q=q, k=k, v=v, **said)
        return result.terms(attended, partial(p.softmax_lse, q=q, k=k, **said))

    def refuse_blocks(self, source: Any) -> None:
        """Rows have no blocks of NZ."""

    def queries(self) -> tuple[Any, ...]:
        """Queries over the latent."""
        return (self.absorbed,)

    def unrotated(self, values: str) -> Tensor:
        """Queries of heads [B, N, S, D] times W_UK, [B, N, S, C], in the same way as the values."""
        return head_projection.expanded(self.nope.transpose(1, 2), self.up_key, values)

    def parts_of_heads(self) -> tuple[Any, Any]:
        """What is expanded is attention of heads as any other."""
        require(False, "keys and values without rotated lanes are expanded as the model has them")
        return (), ()

    def remark(self, lowering: str, machine: Target) -> str:
        """As of `Floats`, where the other form is attention to what the model expands."""
        return _compared("absorbed", machine, self.up_key, self.up_value, 0)


@dataclass(frozen=True)
class _Int8(Encoding):
    """int8 queries over an int8 latent, by the names of the word that reads them.

    Attributes:
        query, rope: queries q8 and their rotated lanes.
        of_values, values_by: the scale of the result, a tensor times a number.
    """

    query: Any = tensor("B N S C")
    rope: Any = tensor("B N S Dr")
    of_values: Any = tensor("V", optional=True)
    values_by: Any = scalar()
    word: ClassVar[str]

    def terms(self, p, source, result, said: dict[str, Any]) -> Any:
        """The result of a form."""
        latent, k_rope = source.latent_terms(p)
        return getattr(p, self.word)(latent=latent, k_rope=k_rope, output_view=result.view, **vars(self), **said)

    def queries(self) -> Parts:
        """Queries over the latent, and their rotated lanes."""
        return self.query, self.rope


@dataclass(frozen=True)
class Int8(_Int8):
    """Queries quantised for each token and head, over a latent with one scale: out = softmax(...) k8 · c.

    Attributes:
        tokens: the scales s of queries, whose rotated lanes are divided by s · c.
        of_values: one of all.
        of_keys, keys_by: the scale c of the scores, a tensor [1] times a number.
    """

    of_values: Any = tensor("1", optional=True)
    tokens: Any = tensor("B N S 1")
    of_keys: Any = tensor("1", optional=True)
    keys_by: Any = scalar()
    word = "int8_latent_attention"

    def refuse_blocks(self, source: Any) -> None:
        """The operator says of pages in blocks of NZ which it reads."""

    def parts_of_heads(self) -> tuple[Any, Any]:
        """Only floats are expanded."""
        require(False, "an int8 latent is not expanded")
        return self.queries(), self.queries()

    def scales(self, version: int) -> dict[str, Any]:
        """What the operator is told of scales."""
        require(version == 2, "the first version of the operator takes no int8 queries")
        device = self.tokens.device
        of_keys = scale_of(self.of_keys, self.keys_by, device)
        alike = self.of_keys is self.of_values and self.keys_by == self.values_by
        return dict(
            query_quant_mode=3,
            dequant_scale_query=self.tokens.float().transpose(1, 2).squeeze(-1).contiguous(),
            dequant_scale_key=of_keys,
            dequant_scale_value=of_keys if alike else scale_of(self.of_values, self.values_by, device),
        )


@dataclass(frozen=True)
class Int8ByHead(_Int8):
    """int8 queries with a scale of the scores of each head, and probabilities in steps of 1 / 127."""

    of_scores: Any = tensor("N")
    word = "int8_probability_attention"

    def refuse_blocks(self, source: Any) -> None:
        """Refuse pages that hold no int8 latent as the operator reads it."""
        source.refuse_blocks(pages.NZ_INT8, pages.NZ)

    def scales_of_heads(self) -> dict[str, Any]:
        """What atb is told of scales."""
        values = scale_of(self.of_values, self.values_by, self.rope.device)
        return dict(qk_descale=self.of_scores.float(), pv_descale=values.expand(self.query.shape[1]).contiguous())

    def expanded(self, y: Tensor, values: str) -> Tensor:
        """A result [B, S, N, C] as [B, N, S, C]: the model itself expands it."""
        return y.transpose(1, 2)
