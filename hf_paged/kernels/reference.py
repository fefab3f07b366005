"""The reference implementation: the operations in plain torch, one sequence at a time, in any precision.

It has the signatures of the fast implementations and defines their correct results. Slow; used by tests and by
`impl="reference"`.
"""

from __future__ import annotations

import torch

from hf_paged.kernels.arguments import Attention, LayerKV, NewKV, Result
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.quantised import dequantised, quantised


def write_kv(new: NewKV, kv: LayerKV, slot_mapping: torch.Tensor) -> None:
    """Fused reshape and block write (SOSP'23 section 5.1). See `ops.write_kv` for shapes."""
    block_size = kv.key.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        place = slot // block_size, slot % block_size
        for rows, cache, factors in zip(new, kv.elements, kv.scales):
            if factors is None:
                cache[place] = rows[token].to(cache.dtype)
            else:
                cache[place], factors[place] = quantised(rows[token], cache.dtype)


def copy_blocks(caches: list[torch.Tensor], copies: torch.Tensor, into: list[torch.Tensor]) -> None:
    """Fused block copy. See `ops.copy_blocks`."""
    for src, dst in copies.tolist():
        for source, target in zip(caches, into):
            target[dst] = source[src]


def paged_attention(
    query: torch.Tensor,
    kv: LayerKV,
    metadata: AttentionMetadata,
    options: Attention,
    new: NewKV | None = None,
    out: torch.Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float64,
) -> Result:
    """See `ops.paged_attention`. Computes in `compute_dtype` and rounds the result once, to the query's dtype."""
    if new is not None:
        write_kv(new, kv, metadata.slot_mapping)
    scale, bounds, softcap, sinks, alibi_slopes, distance_bias, return_lse = options
    num_tokens, num_heads, _ = query.shape
    block_size, group = kv.key.shape[1], num_heads // kv.key.shape[2]
    if out is None:
        out = query.new_empty(num_tokens, num_heads, kv.value.shape[-1])
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=query.device)
    starts = metadata.query_start_loc.tolist()
    for i, seq_len in enumerate(metadata.seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        query_len = starts[i + 1] - starts[i]
        if query_len == 0:
            continue
        q = query[rows].to(compute_dtype)  # [query_len, num_heads, head_dim]
        k_pos = torch.arange(seq_len, dtype=torch.int64, device=query.device)
        q_pos = torch.arange(seq_len - query_len, seq_len, dtype=torch.int64, device=query.device)
        last = q_pos if metadata.reach is None else metadata.reach[rows].long()
        visible = k_pos[None, :] <= last[:, None]  # [query_len, seq_len]
        if (hidden := bounds.hidden(q_pos[:, None], k_pos[None, :])) is not None:
            visible &= ~hidden
        # Read only slots that some query attends to: dropped blocks (-1) and unowned slots must not affect the result.
        seen = visible.any(0).nonzero().flatten()
        blocks = metadata.block_tables[i][seen // block_size].long()
        k, v = (
            dequantised(
                cache[blocks, seen % block_size], None if own is None else own[blocks, seen % block_size], compute_dtype
            ).repeat_interleave(group, dim=1)
            for cache, own in zip(kv.elements, kv.scales)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            distance = (k_pos[seen][None, :] - q_pos[:, None]).to(compute_dtype)
            scores = scores + alibi_slopes.to(compute_dtype)[:, None, None] * distance
        if distance_bias is not None:
            apart = (q_pos[:, None] - k_pos[seen][None, :]).clamp(min=0)
            scores = scores + distance_bias.to(compute_dtype)[:, apart]
        scores = scores.masked_fill(~visible[:, seen], -torch.inf)
        if sinks is not None:
            column = sinks.to(compute_dtype)[:, None, None].expand(-1, query_len, 1)
            scores = torch.cat([scores, column], dim=-1)
        row_lse = torch.logsumexp(scores, dim=-1)  # [num_heads, query_len]
        probs = torch.exp(scores - row_lse[..., None])[..., : len(seen)]
        out[rows] = torch.einsum("hqk,khd->qhd", probs, v).to(out.dtype)
        lse[rows] = row_lse.transpose(0, 1).to(torch.float32)
    return (out, lse) if return_lse else out
