"""The default library of rules, found through the entry-point group `fusion.patterns`."""

from fusion import Rule
from patterns.attention.attention import Attention
from patterns.composites.add_rms_norm import AddRMSNorm
from patterns.composites.add_rms_norm_dynamic_quant import AddRMSNormDynamicQuant
from patterns.composites.attention_update import AttentionUpdate
from patterns.composites.joined_projections import JoinedProjections
from patterns.composites.kv_rmsnorm_rope_cache import KvRmsnormRopeCache, KvRmsnormRopeCacheRows
from patterns.composites.kv_rmsnorm_rope_cache_whole import KvRmsnormRopeCacheWhole
from patterns.composites.latent_attention_atb import LatentAttentionAtb
from patterns.composites.latent_attention_atb_whole import LatentAttentionAtbWhole
from patterns.composites.mla_preprocess import MlaPreprocess
from patterns.composites.mla_preprocess_fixed import MlaPreprocessFixed
from patterns.composites.mla_preprocess_whole import MlaPreprocessWhole
from patterns.composites.mla_prolog import MlaProlog, MlaPrologRows
from patterns.composites.mla_prolog_channels import MlaPrologChannels
from patterns.composites.mla_prolog_paged import MlaPrologPaged
from patterns.composites.mla_prolog_quantised import MlaPrologQuantised
from patterns.composites.mla_prolog_quantised_paged import MlaPrologQuantisedPaged
from patterns.composites.mla_prolog_quantised_rows import MlaPrologQuantisedRows
from patterns.composites.mla_prolog_tiles import MlaPrologTiles
from patterns.composites.mla_prolog_whole import MlaPrologWhole
from patterns.composites.paged_write import PagedWrite
from patterns.composites.ring_mla import RingMla
from patterns.composites.rope_pair import RopePair
from patterns.composites.sparse_attention import SparseAttention
from patterns.composites.swiglu_projections import SwigluProjections
from patterns.latent.attention import LatentAttention
from patterns.primitives.cache_write import CacheWrite
from patterns.primitives.dynamic_quant import DynamicQuant
from patterns.primitives.expert_routing import ExpertRouting, ExpertShares
from patterns.primitives.head_projection import HeadProjection
from patterns.primitives.layer_norm import LayerNorm
from patterns.primitives.page_gather import PageGather
from patterns.primitives.partial_rope import PartialRope
from patterns.primitives.quant_matmul import QuantMatmul
from patterns.primitives.rms_norm import RMSNorm
from patterns.primitives.rope import Rope
from patterns.primitives.sliding_write import SlidingWrite
from patterns.primitives.swiglu import Swiglu


def library() -> tuple[Rule, ...]:
    """Every rule of this package."""
    return (
        RMSNorm(),
        LayerNorm(),
        AddRMSNorm(),
        Rope(),
        PartialRope(),
        RopePair(),
        Swiglu(),
        SwigluProjections(),
        JoinedProjections(),
        HeadProjection(),
        DynamicQuant(),
        QuantMatmul(),
        AddRMSNormDynamicQuant(),
        ExpertRouting(),
        ExpertShares(),
        Attention(),
        LatentAttention(),
        LatentAttentionAtb(),
        LatentAttentionAtbWhole(),
        RingMla(),
        AttentionUpdate(),
        SparseAttention(),
        KvRmsnormRopeCache(),
        KvRmsnormRopeCacheRows(),
        KvRmsnormRopeCacheWhole(),
        MlaProlog(),
        MlaPrologPaged(),
        MlaPrologRows(),
        MlaPrologQuantised(),
        MlaPrologQuantisedPaged(),
        MlaPrologQuantisedRows(),
        MlaPrologWhole(),
        MlaPrologChannels(),
        MlaPrologTiles(),
        MlaPreprocess(),
        MlaPreprocessFixed(),
        MlaPreprocessWhole(),
        CacheWrite(),
        PagedWrite(),
        PageGather(),
        SlidingWrite(),
    )
