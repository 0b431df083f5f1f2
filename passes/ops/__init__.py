"""The halfbyte operators. Each has one reference in torch that defines its result exactly.

Importing this package registers them under ``torch.ops.halfbyte``.
"""

from halfbyte.passes.ops.attention import attention
from halfbyte.passes.ops.cache_append import cache_append
from halfbyte.passes.ops.digit_planes import digit_block, digit_planes
from halfbyte.passes.ops.fp8_block_linear import fp8_block_linear
from halfbyte.passes.ops.fp8_block_moe import fp8_block_moe
from halfbyte.passes.ops.fused_linear import fused_linear
from halfbyte.passes.ops.head_linear import head_linear
from halfbyte.passes.ops.kv_append import blank_caches, kv_append, rotate_append, rotate_append_merged
from halfbyte.passes.ops.latent_append import blank_latents, latent_append
from halfbyte.passes.ops.linear import linear
from halfbyte.passes.ops.moe import moe
from halfbyte.passes.ops.quantize_fp8 import quantize_fp8
from halfbyte.passes.ops.quantize_per_token import quantize_per_token
from halfbyte.passes.ops.rms_norm import rms_norm, rms_norm_merged
from halfbyte.passes.ops.sample import sample
from halfbyte.passes.ops.topk import topk

__all__ = [
    "attention",
    "blank_caches",
    "blank_latents",
    "cache_append",
    "digit_block",
    "digit_planes",
    "fp8_block_linear",
    "fp8_block_moe",
    "fused_linear",
    "head_linear",
    "kv_append",
    "latent_append",
    "linear",
    "moe",
    "quantize_fp8",
    "quantize_per_token",
    "rms_norm",
    "rms_norm_merged",
    "rotate_append",
    "rotate_append_merged",
    "sample",
    "topk",
]
