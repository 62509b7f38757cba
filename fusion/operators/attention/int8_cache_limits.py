"""Limits of npu_fused_infer_attention_score on stored keys and values (C8), which it dequantises by scales itself.

    k = (key + offset) · scale, v likewise

There is a scale per channel or one for all (mode 0), one per token (1), per head (2), or per token and head (3).

Sources are the pages of op-plugin (both versions: one query, several queries, pages in fractal NZ) and those of
ops-transformer (aclnnFusedInferAttentionScoreV4, and the checks of the kernel, incre_flash_attention_tiling_check).
Where they disagree the stricter holds: for several queries one table has scales with a dim for sequences and the text
before it has none, and scales in the pages themselves (modes 4 and 5) are in the tables of op-plugin alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.operators.attention.layouts import in_layouts
from fusion.operators.encodings import FLOAT8, INT8, STORED
from fusion.operators.limits import Limit

_NAMES = tuple(each.name for each in STORED.values())
CACHE = f"dtype(query) != 'int8' and dtype(key) in {_NAMES}"
"""Condition of calls with queries in floats over a cache of stored numbers."""
FLOATS = f"dtype(value) not in {_NAMES}"
_OTHERS = tuple(each.name for each in STORED.values() if each is not INT8)
_INTEGERS = tuple(each.name for each in STORED.values() if each.is_integer)
_ND, _NZ = f"{CACHE} and rank(key) < 5", f"{CACHE} and rank(key) == 5"
_PACKED, _BSND, _BNSD = in_layouts("TND", "NTD"), in_layouts("BSND"), in_layouts("BNSD")
_ALIKE = "keys and values are scaled alike"
_ONE, _PER_HEAD = "(1,)", "(num_key_value_heads,)"
_CHANNELS = "(1, num_key_value_heads, 1, D)"
_HEADS, _ROWS = "(num_key_value_heads, 1, D)", "(num_key_value_heads, D)"
"""Shapes of scales per channel that the kernel takes with pages in NZ, in layout BNSD and BSND."""
_PAIRS = ((10, 1), (64, 8), (80, 8), (128, 16))
"""Pairs of query heads and key heads for which the kernel reads pages in NZ."""


@dataclass(frozen=True)
class Antiquant:
    """Names that one version of the operator has for the scales, offsets and modes, each of keys and of values."""

    scales: tuple[str, str]
    offsets: tuple[str, str]
    modes: tuple[str, str]
    joint: tuple[str, str, str] | None = None
    """Names of scale, offset and mode of keys and values in one tensor, None if the version has none."""

    def host(self, and_when: str = "") -> tuple[Limit | str, ...]:
        """Return the limits of every machine on scales and offsets of int8 keys and values.

        That scales imply an int8 cache holds only in calls that satisfy the condition `and_when` as well, "" or a text
        that begins with " and ": in other calls the same arguments mean something else.
        """
        (scale, value_scale), (offset, value_offset), (mode, value_mode) = self.scales, self.offsets, self.modes
        shapes = f"{_CHANNELS}, {_HEADS}, {_ROWS}, {_ONE}"
        separate = CACHE if self.joint is None else f"{CACHE} and not given({self.joint[0]})"
        return (
            Limit("dtype(value) == dtype(key)", when=CACHE),
            Limit(FLOATS, when=f"dtype(key) not in {_NAMES}"),
            Limit("shape(value) == shape(key)", when=CACHE, because=_ALIKE),
            *self._jointly(),
            *(Limit(f"given({name})", when=separate) for name in self.scales),
            *(Limit(CACHE, when=f"given({name}){and_when}") for name in self.scales),
            *(Limit(f"{CACHE} and dtype(key) in {_INTEGERS}", when=f"given({name})") for name in self.offsets),
            Limit(f"given({value_offset})", when=f"given({offset})"),
            Limit(f"given({offset})", when=f"given({value_offset})"),
            Limit(f"{mode} in (0, 1, 2, 3)", because="scales in pages are not decomposed"),
            Limit(f"{mode} == 0", when=f"not ({CACHE})"),
            Limit(f"{value_mode} == {mode}", because=_ALIKE),
            Limit("num_key_value_heads > 0", when=CACHE, because="scales are given for so many heads"),
            Limit("not given(query_rope)", when=CACHE),
            Limit(f"{_BSND} or {_BNSD}", when=CACHE, because="int8 keys in other layouts are not decomposed"),
            Limit(f"shape({scale}) in ({shapes})", when=f"{separate} and {mode} == 0"),
            Limit(f"shape({scale}) == {_PER_HEAD}", when=f"{separate} and {mode} == 2"),
            *self._token_limits(scale, mode),
            Limit(f"shape({value_scale}) == shape({scale})", when=separate, because=_ALIKE),
            *(
                Limit(f"given({name})", when=f"given({other})", because=_ALIKE)
                for name, other in zip(self.scales, self.offsets, strict=True)
            ),
            *(Limit(f"shape({name}) == shape({scale})", when=f"given({name})") for name in self.offsets),
        )

    def _jointly(self) -> tuple[Limit, ...]:
        """Return limits on scales and offsets [2, ..] of keys, then of values, in one tensor."""
        if self.joint is None:
            return ()
        scale, offset, mode = self.joint
        given = f"given({scale})"
        shapes = (
            "(2,)",
            "(2, num_key_value_heads, 1, D)",
            "(2, num_key_value_heads, D)",
            "(2, num_key_value_heads * D)",
        )
        tokens = f"{given} and {mode} == 1"
        return (
            Limit(CACHE, when=given),
            Limit(f"not given({self.scales[0]}) and not given({self.scales[1]})", when=given, because="they are twice"),
            Limit(f"{self.modes[0]} == 0 and {self.modes[1]} == 0", when=given, because=f"{mode} says how"),
            Limit(given, when=f"given({offset}) or {mode} != 0"),
            Limit(f"{mode} in (0, 1)", because="the page has no other"),
            Limit(f"shape({scale}) in ({', '.join(shapes)})", when=f"{given} and {mode} == 0"),
            Limit(f"rank({scale}) == 3 and size({scale}, 0) == 2 and size({scale}, 1) == B", when=tokens),
            *self._long_enough(scale, tokens),
            Limit(f"shape({offset}) == shape({scale})", when=f"given({offset})"),
        )

    def _long_enough(self, scale: str, when: str) -> tuple[Limit, ...]:
        """Return limits in calls with `when` that the argument `scale`, one per token, has at least as many as there
        are keys.
        """
        last = f"size({scale}, 2) >= "
        return (
            Limit(f"{last}M * block_size", when=f"{when} and given(block_table)"),
            Limit(f"{last}U", when=f"{when} and not given(block_table) and {_BNSD}"),
            Limit(f"{last}Q", when=f"{when} and not given(block_table) and {_BSND}"),
        )

    def _token_limits(self, scale: str, mode: str) -> tuple[Limit, ...]:
        tokens = f"{CACHE} and {mode} in (1, 3)"
        heads = f"size({scale}, 0) == B and size({scale}, 1) == num_key_value_heads"
        return (
            Limit(f"rank({scale}) == 3", when=tokens),
            Limit(f"size({scale}, 0) == 1 and size({scale}, 1) == B", when=f"{CACHE} and {mode} == 1"),
            Limit(heads, when=f"{CACHE} and {mode} == 3"),
            *self._long_enough(scale, tokens),
        )

    def kernel(self, lse: str, query_lengths: str) -> tuple[Limit | str, ...]:
        """Return the limits of the kernels: on any int8 cache, on row-major rows and pages, and on pages in NZ.

        `lse` and `query_lengths` are the names of the arguments for the log-sum-exp and for the lengths of the queries.
        """
        mode = self.modes[0]
        return (
            *(Limit(f"dtype(key) != '{name}'", because="A2 and A3 dequantise int8 alone") for name in _OTHERS),
            *self._dtypes(),
            *(Limit(f"dtype({name}) == dtype(query)", when=f"given({name})") for name in self.offsets),
            Limit("input_layout in ('BSND', 'BNSD')", when=CACHE),
            Limit(f"not given({self.offsets[0]})", when=f"{CACHE} and {mode} in (1, 3)", because="no rule asks for it"),
            Limit("D % 32 == 0", when=CACHE, because="a line of memory holds 32 int8"),
            Limit(f"not {lse}", when=CACHE, because="of int8 keys no log-sum-exp is documented"),
            Limit("S <= 16", when=CACHE),
            *self._nd(mode),
            *self._nz(mode, query_lengths),
        )

    def _dtypes(self) -> tuple[Limit, ...]:
        """Return the limits of the kernels on the dtypes of scales: that of the queries, or float32 per token."""
        mode = self.modes[0]
        return (
            *(Limit(f"dtype({name}) == dtype(query)", when=f"{CACHE} and {mode} in (0, 2)") for name in self.scales),
            *(Limit(f"dtype({name}) == 'float32'", when=f"{CACHE} and {mode} in (1, 3)") for name in self.scales),
        )

    def float8(self, lse: str) -> tuple[Limit | str, ...]:
        """Return the limits of the kernels of Ascend 950 on a cache of float8; `lse` asks for the log-sum-exp.

        Source: aclnnFusedInferAttentionScoreV5 (modes per channel and per token; the page has no offset for float8).
        """
        mode = self.modes[0]
        return (
            Limit(f"dtype(key) == '{FLOAT8.name}'", because="other calls on Ascend 950 are not declared"),
            *self._dtypes(),
            Limit(f"{mode} in (0, 1)", because="float8 has scales per channel or per token"),
            Limit(f"shape({self.scales[0]}) != {_ONE}", when=f"{mode} == 0", because="one scale for all is of int8"),
            "D % 32 == 0",
            Limit("rank(key) < 5", because="the page has NZ for other calls"),
            Limit("block_size % 32 == 0 and block_size <= 512", when="given(block_table)"),
            Limit(f"not {lse}", because="of stored keys no log-sum-exp is documented"),
        )

    def _nd(self, mode: str) -> tuple[Limit, ...]:
        """Return the limits of the kernels on row-major rows and pages, with one or several queries per sequence."""
        scale = self.scales[0]
        one, several = f"{_ND} and S == 1", f"{_ND} and S > 1"
        alone = "several queries read int8 keys in rows or, in NZ, in pages"
        return (
            Limit("block_size % 32 == 0", when=f"{one} and given(block_table)"),
            Limit("not given(block_table)", when=several, because=alone),
            Limit("dtype(query) == 'bfloat16'", when=several),
            Limit(f"shape({scale}) in ({_CHANNELS}, {_ONE})", when=f"{one} and {mode} == 0"),
            Limit(f"{mode} == 0", when=several),
            Limit(f"shape({scale}) in ({_HEADS}, {_ROWS})", when=f"{several} and {mode} == 0"),
        )

    def _nz(self, mode: str, query_lengths: str) -> tuple[Limit, ...]:
        """Return the limits of the kernels on pages in NZ."""
        scale = self.scales[0]
        pairs = " or ".join(f"N == {heads} and num_key_value_heads == {shared}" for heads, shared in _PAIRS)
        return (
            Limit("dtype(query) == 'bfloat16'", when=_NZ),
            Limit("D == 128", when=_NZ),
            Limit("L == 32", when=_NZ, because="a line of NZ holds 32 int8"),
            Limit(pairs, when=_NZ),
            Limit("block_size in (128, 512)", when=_NZ),
            Limit(f"not given({self.offsets[0]})", when=_NZ, because="pages in NZ have symmetric scales"),
            Limit(f"{mode} == 0", when=_NZ),
            Limit(f"shape({scale}) == {_HEADS}", when=f"{_NZ} and {_BNSD}"),
            Limit(f"shape({scale}) == {_ROWS}", when=f"{_NZ} and {_BSND}"),
            Limit("inner_precise == 1", when=_NZ, because="pages in NZ are read in the fast mode alone"),
            Limit("not given(pse_shift)", when=_NZ),
            Limit(f"not given({query_lengths})", when=_NZ),
            Limit("sparse_mode == 0 and not given(atten_mask)", when=f"{_NZ} and S == 1"),
            Limit("sparse_mode == 3", when=f"{_NZ} and S > 1"),
            Limit("rank(atten_mask) == 2", when=f"{_NZ} and S > 1"),
        )
