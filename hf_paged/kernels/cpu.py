"""The torch path: what runs on a CPU without a compiler (first version: gather + one masked SDPA)."""

from __future__ import annotations

import torch

from hf_paged.kernels.metadata import AttentionMetadata


def write_kv(key, value, key_cache, value_cache, slot_mapping):
    """See `ops.write_kv`."""
    if bool((slot_mapping < 0).any()):
        keep = slot_mapping >= 0
        key, value, slot_mapping = key[keep], value[keep], slot_mapping[keep]
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value.to(value_cache.dtype))


def copy_blocks(caches, copies):
    """See `ops.copy_blocks`."""
    for cache in caches:
        cache[copies[:, 1]] = cache[copies[:, 0]]


def paged_attention(query, key_cache, value_cache, metadata: AttentionMetadata, **kwargs):
    """See `ops.paged_attention`."""
    from hf_paged.kernels import reference

    return reference.paged_attention(query, key_cache, value_cache, metadata, compute_dtype=torch.float32, **kwargs)
