"""The default library of rules, found through the entry-point group `fusion.patterns`."""

from fusion import Rule
from patterns.composites.add_rms_norm import AddRMSNorm
from patterns.composites.add_rms_norm_dynamic_quant import AddRMSNormDynamicQuant
from patterns.composites.attention_update import AttentionUpdate
from patterns.composites.joined_projections import JoinedProjections
from patterns.composites.kv_rmsnorm_rope_cache import KvRmsnormRopeCache, KvRmsnormRopeCacheRows
from patterns.composites.kv_rmsnorm_rope_cache_whole import KvRmsnormRopeCacheWhole
from patterns.composites.latent_attention import LatentAttention
from patterns.composites.latent_attention_atb import LatentAttentionAtb
from patterns.composites.latent_attention_atb_whole import LatentAttentionAtbWhole
from patterns.composites.latent_attention_paged import PagedLatentAttention
from patterns.composites.latent_attention_part import LatentAttentionPart
from patterns.composites.latent_attention_whole import LatentAttentionWhole
from patterns.composites.mla_preprocess import MlaPreprocess
from patterns.composites.mla_preprocess_fixed import MlaPreprocessFixed
from patterns.composites.mla_preprocess_whole import MlaPreprocessWhole
from patterns.composites.paged_write import PagedWrite
from patterns.composites.ring_mla import RingMla
from patterns.composites.rope_pair import RopePair
from patterns.composites.sparse_attention import SparseAttention
from patterns.composites.swiglu_projections import SwigluProjections
from patterns.latent.prolog import MlaProlog
from patterns.primitives.attention import Attention
from patterns.primitives.attention_pages import PagedAttention
from patterns.primitives.attention_part import AttentionPart
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
        PagedAttention(),
        AttentionPart(),
        LatentAttention(),
        PagedLatentAttention(),
        LatentAttentionPart(),
        LatentAttentionAtb(),
        LatentAttentionAtbWhole(),
        LatentAttentionWhole(),
        RingMla(),
        AttentionUpdate(),
        SparseAttention(),
        KvRmsnormRopeCache(),
        KvRmsnormRopeCacheRows(),
        KvRmsnormRopeCacheWhole(),
        MlaProlog(),
        MlaPreprocess(),
        MlaPreprocessFixed(),
        MlaPreprocessWhole(),
        CacheWrite(),
        PagedWrite(),
        PageGather(),
        SlidingWrite(),
    )
