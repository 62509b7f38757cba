"""What npu_fused_infer_attention_score asks of int8 keys and values (C8), which it multiplies by scales itself.

    k = (key + offset) · scale, v likewise

Scales are those of each channel or of all (mode 0), of each token (1), of each head (2), of each token and head (3).

From the pages of op-plugin (both versions: one query, several queries, pages in fractal NZ) and of ops-transformer
(aclnnFusedInferAttentionScoreV4, and the checks of the kernel, incre_flash_attention_tiling_check). Where they disagree
the stricter holds: for several queries one table has scales with a dim for sequences and the text before it has none,
and scales that lie in pages themselves (modes 4 and 5) are in the tables of the former alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.operators.attention.layouts import lying
from fusion.operators.limits import Limit

CACHE = "dtype(query) != 'int8' and dtype(key) == 'int8'"
"""Calls over an int8 cache, whose queries are floats."""
_ND, _NZ = f"{CACHE} and rank(key) < 5", f"{CACHE} and rank(key) == 5"
_PACKED, _BSND, _BNSD = lying("TND", "NTD"), lying("BSND"), lying("BNSD")
_ALIKE = "keys and values are scaled alike"
_OF_ALL, _OF_HEADS = "(1,)", "(num_key_value_heads,)"
_CHANNELS = "(1, num_key_value_heads, 1, D)"
_HEADS, _ROWS = "(num_key_value_heads, 1, D)", "(num_key_value_heads, D)"
"""Scales of each channel, as the layouts of pages in NZ ask for them."""
_PAIRS = ((10, 1), (64, 8), (80, 8), (128, 16))
"""Heads of queries and of keys for which there are pages in NZ."""


@dataclass(frozen=True)
class Antiquant:
    """What a version calls the scales, the offsets and the modes, of keys and of values."""

    scales: tuple[str, str]
    offsets: tuple[str, str]
    modes: tuple[str, str]
    joint: tuple[str, str, str] | None = None
    """Scale, offset and mode of keys and values in one tensor."""

    def host(self, unless: str = "") -> tuple[Limit | str, ...]:
        """What every machine asks for; `unless` says which calls tell other things by the same arguments."""
        (scale, of_values), (offset, offset_of_values), (mode, mode_of_values) = self.scales, self.offsets, self.modes
        shapes = f"{_CHANNELS}, {_HEADS}, {_ROWS}, {_OF_ALL}"
        apart = CACHE if self.joint is None else f"{CACHE} and not given({self.joint[0]})"
        return (
            Limit("dtype(value) == 'int8'", when=CACHE),
            Limit("dtype(value) != 'int8'", when="dtype(key) != 'int8'"),
            Limit("shape(value) == shape(key)", when=CACHE, because=_ALIKE),
            *self._jointly(),
            *(Limit(f"given({name})", when=apart) for name in self.scales),
            *(Limit(CACHE, when=f"given({name}){unless}") for name in self.scales),
            *(Limit(CACHE, when=f"given({name})") for name in self.offsets),
            Limit(f"given({offset_of_values})", when=f"given({offset})"),
            Limit(f"given({offset})", when=f"given({offset_of_values})"),
            Limit(f"{mode} in (0, 1, 2, 3)", because="scales in pages are not decomposed"),
            Limit(f"{mode} == 0", when=f"not ({CACHE})"),
            Limit(f"{mode_of_values} == {mode}", because=_ALIKE),
            Limit("num_key_value_heads > 0", when=CACHE, because="scales are told of so many heads"),
            Limit("not given(query_rope)", when=CACHE),
            Limit(f"{_BSND} or {_BNSD}", when=CACHE, because="int8 keys in other layouts are not decomposed"),
            Limit(f"shape({scale}) in ({shapes})", when=f"{apart} and {mode} == 0"),
            Limit(f"shape({scale}) == {_OF_HEADS}", when=f"{apart} and {mode} == 2"),
            *self._of_tokens(scale, mode),
            Limit(f"shape({of_values}) == shape({scale})", when=apart, because=_ALIKE),
            *(
                Limit(f"given({name})", when=f"given({other})", because=_ALIKE)
                for name, other in zip(self.scales, self.offsets, strict=True)
            ),
            *(Limit(f"shape({name}) == shape({scale})", when=f"given({name})") for name in self.offsets),
        )

    def _jointly(self) -> tuple[Limit, ...]:
        """Limit scales and offsets [2, ..] of keys, then of values, in one tensor."""
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
        """Require as many scales of tokens as there are keys."""
        last = f"size({scale}, 2) >= "
        return (
            Limit(f"{last}M * block_size", when=f"{when} and given(block_table)"),
            Limit(f"{last}U", when=f"{when} and not given(block_table) and {_BNSD}"),
            Limit(f"{last}Q", when=f"{when} and not given(block_table) and {_BSND}"),
        )

    def _of_tokens(self, scale: str, mode: str) -> tuple[Limit, ...]:
        tokens = f"{CACHE} and {mode} in (1, 3)"
        heads = f"size({scale}, 0) == B and size({scale}, 1) == num_key_value_heads"
        return (
            Limit(f"rank({scale}) == 3", when=tokens),
            Limit(f"size({scale}, 0) == 1 and size({scale}, 1) == B", when=f"{CACHE} and {mode} == 1"),
            Limit(heads, when=f"{CACHE} and {mode} == 3"),
            *self._long_enough(scale, tokens),
        )

    def kernel(self, lse: str, query_lengths: str) -> tuple[Limit | str, ...]:
        """What the kernels ask for, of rows and pages as they lie and of pages in NZ."""
        mode = self.modes[0]
        return (
            *(Limit(f"dtype({name}) == dtype(query)", when=f"{CACHE} and {mode} in (0, 2)") for name in self.scales),
            *(Limit(f"dtype({name}) == 'float32'", when=f"{CACHE} and {mode} in (1, 3)") for name in self.scales),
            *(Limit(f"dtype({name}) == dtype(query)", when=f"given({name})") for name in self.offsets),
            Limit("input_layout in ('BSND', 'BNSD')", when=CACHE),
            Limit(f"not given({self.offsets[0]})", when=f"{CACHE} and {mode} in (1, 3)", because="no rule asks for it"),
            Limit("D % 32 == 0", when=CACHE, because="a line of memory holds 32 int8"),
            Limit(f"not {lse}", when=CACHE, because="of int8 keys no log-sum-exp is documented"),
            Limit("S <= 16", when=CACHE),
            *self._nd(mode),
            *self._nz(mode, query_lengths),
        )

    def _nd(self, mode: str) -> tuple[Limit, ...]:
        scale = self.scales[0]
        one, several = f"{_ND} and S == 1", f"{_ND} and S > 1"
        alone = "several queries read int8 keys in rows or, in NZ, in pages"
        return (
            Limit("block_size % 32 == 0", when=f"{one} and given(block_table)"),
            Limit("not given(block_table)", when=several, because=alone),
            Limit("dtype(query) == 'bfloat16'", when=several),
            Limit(f"shape({scale}) in ({_CHANNELS}, {_OF_ALL})", when=f"{one} and {mode} == 0"),
            Limit(f"{mode} == 0", when=several),
            Limit(f"shape({scale}) in ({_HEADS}, {_ROWS})", when=f"{several} and {mode} == 0"),
        )

    def _nz(self, mode: str, query_lengths: str) -> tuple[Limit, ...]:
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
