"""The default library of rules, found through the entry-point group `fusion.patterns`."""

from fusion import Rule
from patterns.cache.cache_write import CacheWrite
from patterns.composites.add_rms_norm import AddRMSNorm
from patterns.composites.add_rms_norm_dynamic_quant import AddRMSNormDynamicQuant
from patterns.composites.attention_update import AttentionUpdate
from patterns.composites.joined_projections import JoinedProjections
from patterns.composites.latent_attention import LatentAttention
from patterns.composites.latent_attention_paged import PagedLatentAttention
from patterns.composites.latent_attention_part import LatentAttentionPart
from patterns.composites.latent_attention_whole import LatentAttentionWhole
from patterns.composites.mla_prolog import MlaProlog, MlaPrologRows
from patterns.composites.mla_prolog_channels import MlaPrologChannels
from patterns.composites.mla_prolog_paged import MlaPrologPaged
from patterns.composites.mla_prolog_quantised import MlaPrologQuantised
from patterns.composites.mla_prolog_quantised_paged import MlaPrologQuantisedPaged
from patterns.composites.mla_prolog_quantised_rows import MlaPrologQuantisedRows
from patterns.composites.mla_prolog_tiles import MlaPrologTiles
from patterns.composites.mla_prolog_whole import MlaPrologWhole
from patterns.composites.ring_mla import RingMla
from patterns.composites.rope_pair import RopePair
from patterns.composites.sparse_attention import SparseAttention
from patterns.composites.swiglu_projections import SwigluProjections
from patterns.latent.attention_atb import LatentAttentionAtb
from patterns.latent.kv_write import KvRmsnormRopeCache
from patterns.latent.preprocess import MlaPreprocess
from patterns.primitives.attention import Attention
from patterns.primitives.attention_pages import PagedAttention
from patterns.primitives.attention_part import AttentionPart
from patterns.primitives.dynamic_quant import DynamicQuant
from patterns.primitives.expert_routing import ExpertRouting, ExpertShares
from patterns.primitives.head_projection import HeadProjection
from patterns.primitives.layer_norm import LayerNorm
from patterns.primitives.page_gather import PageGather
from patterns.primitives.partial_rope import PartialRope
from patterns.primitives.quant_matmul import QuantMatmul
from patterns.primitives.rms_norm import RMSNorm
from patterns.primitives.rope import Rope
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
        LatentAttentionWhole(),
        RingMla(),
        AttentionUpdate(),
        SparseAttention(),
        KvRmsnormRopeCache(),
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
        CacheWrite(),
        PageGather(),
    )
