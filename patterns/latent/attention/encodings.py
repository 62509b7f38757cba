"""Facet of attention over a latent: the encoding of latent and queries, in floating point or in int8."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from fusion import Group, Target, attribute, encodings, require, scalar, tensor
from patterns.attention.calls import Parts
from patterns.cache import pages
from patterns.kit.int8_scales import scale_of
from patterns.latent import head_projection
from patterns.latent.attention.absorption_cost import Sizes, break_even


@dataclass(frozen=True)
class Encoding(Group):
    """Base of the encodings: no scales, no W_UK and W_UV in the graph, all rows of the latent."""

    first_rows = up_key = up_value = None

    def scales(self, version: int) -> dict[str, Any]:
        """Return the arguments for scales of this version of npu_fused_infer_attention_score, none for floats."""
        return {}

    def scales_of_heads(self) -> dict[str, Any]:
        """Return the arguments for scales of npu_multi_head_latent_attention, none for floats."""
        return {}

    def unrotated(self, values: str) -> Any:
        """Compute the absorbed queries [B, N, S, C] of a latent without rotated lanes; refuse one that has some."""
        require(False, "keys: some of their lanes are rotated; this call requires none")

    def expanded(self, y: Tensor, values: str) -> Tensor:
        """Multiply a result `y` [B, S, N, C] by W_UV: [B, N, S, E], or [B, N, S, C] where the graph has no W_UV.

        `values` chooses the operator, see `head_projection.expanded`.
        """
        return head_projection.expanded(y, self.up_value, values)

    def remark(self, lowering: str, machine: Target) -> str:
        """Return a note on the lowering that was chosen, absorption or expansion, and from how many queries the other
        costs less.

        "" if there is only one.
        """
        return ""


@dataclass(frozen=True)
class Floats(Encoding):
    """Floating point, for a model that reads all rows of the latent.

    Attributes:
        nope, up_key: unrotated lanes of the queries and W_UK, where the model does not absorb W_UK itself.
        absorbed: nope · up_key.
        q_rope: rotated lanes of the queries.
        up_value: W_UV, where the model does not multiply the result by it itself.
    """

    nope: Any = tensor("B N S D", optional=True)
    q_rope: Any = tensor("B N S Dr")
    absorbed: Any = tensor("B N S C")
    up_key: Any = tensor("N D C", optional=True)
    up_value: Any = tensor("N C E", optional=True)

    def terms(self, p, source, result, captures: dict[str, Any], word: str = "softmax_attention") -> Any:
        """Build the terms of the results: attention `word` of queries, keys and values of a latent, and `captures`.

        `source` gives the terms of the latent, `result` the results.
        """
        latent, k_rope = source.latent_terms(p)
        k = p.latent_keys(latent=latent, rope=k_rope, up=self.up_key, rows=self.first_rows)
        q = p.latent_queries(nope=self.nope, rope=self.q_rope, absorbed=self.absorbed, keys=k)
        v = p.latent_values(latent=latent, up=self.up_value)
        attended = partial(getattr(p, word), q=q, k=k, v=v, **captures)
        return result.terms(attended, partial(p.softmax_lse, q=q, k=k, **captures))

    def refuse_blocks(self, source: Any, operator: str) -> None:
        """Refuse pages in NZ blocks of other than 16 lanes."""
        source.refuse_blocks(operator, pages.NZ, pages.NZ)

    def queries(self) -> Parts:
        """Return the absorbed queries [B, N, S, C] and their rotated lanes [B, N, S, Dr]."""
        return self.absorbed, self.q_rope

    def parts_of_heads(self) -> tuple[Any, Any]:
        """Return queries before absorption with their rotated lanes, and W_UK with W_UV; refuse if one is absent."""
        require(
            self.nope is not None and self.up_value is not None,
            "projections: the model multiplies queries by W_UK, or results by W_UV, itself; a call on expanded "
            "keys requires both projections in the graph",
        )
        return (self.nope, self.q_rope), (self.up_key, self.up_value)

    def remark(self, lowering: str, machine: Target) -> str:
        """Return a note as `Encoding.remark` does; "" where the model absorbs W_UK or W_UV itself, which leaves no
        choice.
        """
        if self.up_key is None or self.up_value is None:
            return ""
        form = "expanded" if lowering.startswith("expanded") else "absorbed"
        return _compared(form, machine, self.up_key, self.up_value, self.q_rope.shape[3])


def _compared(form: str, machine: Target, up_key: Any, up_value: Any, rope: Any) -> str:
    """Return a note on the chosen `form`, "absorbed" or "expanded", and on the number of queries from which expanding
    costs less on `machine`.

    The sizes are those of W_UK `up_key`, W_UV `up_value` and the rotated lanes `rope`.
    """
    heads, width, rank = up_key.shape
    even = break_even(machine, Sizes(heads, rank, width, rope, up_value.shape[2]))
    until = f"expanding costs less from about {even} queries on" if even else "expanding never costs less"
    return f"{form}: behind a long context, on {machine.name}, {until}"


@dataclass(frozen=True)
class Plain(Floats):
    """Floating point, for a model that reads the leading `first_rows` of the latent; None for all."""

    first_rows: Any = attribute()


@dataclass(frozen=True)
class Unrotated(Encoding):
    """Floating point, for a latent without rotated lanes: the single head of keys and values. Fields as in `Plain`."""

    nope: Any = tensor("B N S D")
    absorbed: Any = tensor("B N S C")
    up_key: Any = tensor("N D C")
    up_value: Any = tensor("N C E")
    first_rows: Any = attribute()

    def terms(self, p, source, result, captures: dict[str, Any]) -> Any:
        """Build the terms of the results: attention of queries, keys and values of a latent, and other `captures`."""
        k = p.unrotated_keys(latent=source.first, up=self.up_key, rows=self.first_rows)
        q = p.unrotated_queries(nope=self.nope, absorbed=self.absorbed, keys=k)
        v = p.latent_values(latent=source.first, up=self.up_value)
        attended = partial(p.softmax_attention, q=q, k=k, v=v, **captures)
        return result.terms(attended, partial(p.softmax_lse, q=q, k=k, **captures))

    def refuse_blocks(self, source: Any, operator: str) -> None:
        """Refuse nothing: the latent is in rows, which have no NZ blocks."""

    def queries(self) -> tuple[Any, ...]:
        """Return the absorbed queries [B, N, S, C] alone: no lanes are rotated."""
        return (self.absorbed,)

    def unrotated(self, values: str) -> Tensor:
        """Multiply the queries [B, N, S, D] by W_UK: [B, N, S, C]; `values` chooses the operator, as in `expanded`."""
        return head_projection.expanded(self.nope.transpose(1, 2), self.up_key, values)

    def parts_of_heads(self) -> tuple[Any, Any]:
        """Refuse every call: without rotated lanes, expanded keys and values are ordinary attention, which has a rule
        of its own.
        """
        require(False, "keys, values: they have no rotated lanes; the model expands them itself")
        return (), ()

    def remark(self, lowering: str, machine: Target) -> str:
        """Return a note on absorption, and on the number of queries from which expanded keys and values would cost
        less.
        """
        return _compared("absorbed", machine, self.up_key, self.up_value, 0)


@dataclass(frozen=True)
class _Int8(Encoding):
    """int8 queries over an int8 latent; the fields have the names of the captures of `word`.

    Attributes:
        query, rope: queries q8 and their rotated lanes.
        of_values, values_by: scale of the result, a tensor times a number.
    """

    query: Any = tensor("B N S C")
    rope: Any = tensor("B N S Dr")
    of_values: Any = tensor("V", optional=True)
    values_by: Any = scalar()
    word: ClassVar[str]

    def terms(self, p, source, result, captures: dict[str, Any]) -> Any:
        """Build the term of the result: the attention `word` over an int8 latent, with other `captures`."""
        latent, k_rope = source.latent_terms(p)
        return getattr(p, self.word)(latent=latent, k_rope=k_rope, output_view=result.view, **vars(self), **captures)

    def queries(self) -> Parts:
        """Return the absorbed int8 queries [B, N, S, C] and their rotated lanes [B, N, S, Dr]."""
        return self.query, self.rope


@dataclass(frozen=True)
class Int8(_Int8):
    """Queries quantised for each token and head, over a latent with one scale c: out = softmax(..) k8 · c.

    Attributes:
        tokens: scales s of the queries; the rotated lanes are divided by s · c.
        of_values: scale of the result, a tensor [1].
        of_keys, keys_by: scale c of the scores, a tensor [1] times a number.
    """

    of_values: Any = tensor("1", optional=True)
    tokens: Any = tensor("B N S 1")
    of_keys: Any = tensor("1", optional=True)
    keys_by: Any = scalar()
    word = "int8_latent_attention"

    def refuse_blocks(self, source: Any, operator: str) -> None:
        """Refuse nothing here: NZ blocks are checked by the limits of the operator."""

    def parts_of_heads(self) -> tuple[Any, Any]:
        """Refuse: an int8 latent is not expanded."""
        require(False, "latent: it is int8; a call on expanded keys requires floats")
        return self.queries(), self.queries()

    def scales(self, version: int) -> dict[str, Any]:
        """Return the arguments for the scales of queries, keys and values; refuse the first version of the operator."""
        require(
            version == 2,
            "queries: they are int8; npu_fused_infer_attention_score requires floats, its version 2 takes int8",
        )
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
    """int8 queries with scales [N] of the scores of each head, and probabilities in steps of 1 / 127."""

    of_scores: Any = tensor("N")
    word = "int8_probability_attention"

    def refuse_blocks(self, source: Any, operator: str) -> None:
        """Refuse pages other than NZ with blocks of 32 lanes for the latent and 16 for rotated lanes."""
        source.refuse_blocks(operator, encodings.INT8.line, pages.NZ)

    def scales_of_heads(self) -> dict[str, Any]:
        """Return npu_multi_head_latent_attention's scales of the scores and of the values, float32 [N] each."""
        values = scale_of(self.of_values, self.values_by, self.rope.device)
        return dict(qk_descale=self.of_scores.float(), pv_descale=values.expand(self.query.shape[1]).contiguous())

    def expanded(self, y: Tensor, values: str) -> Tensor:
        """Transpose a result `y` [B, S, N, C] to [B, N, S, C]: the model multiplies it by W_UV itself."""
        return y.transpose(1, 2)
