"""The torch path: the three operations on a CPU that has no compiler (and wherever the native kernel does not apply).

Gathers K/V slots into a workspace that all calls share, then one fused attention per bucket of sequences of similar
length. What is computed for a sequence depends on its own lengths only, never on the other rows of the batch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from hf_paged.kernels.buckets import MAX_BATCHED_QUERY_LEN, Bucket, make_buckets, slice_bucket
from hf_paged.kernels.metadata import AttentionMetadata

WRITES_NEW_KV = True  # whether paged_attention takes the step's K/V too, and writes it
# A bucket is cut so that its gathered K/V stays about this large: what was just copied is then still in the cache.
_WORKSPACE_BYTES = 16 << 20
# A plain decode step that gathers more than this a core is cut into parts that stay in the caches next to the core.
_WHOLE_BYTES, _NEAR_BYTES = 4 << 20, 768 << 10

_local = threading.local()
_sdpa = torch.nn.functional.scaled_dot_product_attention
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # the same, with its log-sum-exp


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `ops.write_kv`."""
    _write(key, value, key_cache, value_cache, *_without_padding(slot_mapping))


def _without_padding(slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The slots that are real, and the rows they belong to (None: all)."""
    if slot_mapping.numel() == 0 or int(slot_mapping.min()) >= 0:
        return slot_mapping, None
    rows = (slot_mapping >= 0).nonzero().flatten()
    return slot_mapping[rows], rows


def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    if rows is not None:
        key, value = key[rows], value[rows]
    key_cache.flatten(0, 1).index_copy_(0, slots, key.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slots, value.to(value_cache.dtype))


def copy_blocks(caches: list[torch.Tensor], copies: torch.Tensor, into: list[torch.Tensor]) -> None:
    """See `ops.copy_blocks`."""
    sources, targets = copies[:, 0].contiguous(), copies[:, 1].contiguous()
    for source, target in zip(caches, into):
        target.index_copy_(0, targets, source.index_select(0, sources))


# -- attention ----------------------------------------------------------------------------------------------------


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `ops.paged_attention`."""
    if key is not None and value is not None:
        writes = metadata.scratch.get("torch writes")
        if writes is None:
            writes = metadata.scratch["torch writes"] = _without_padding(metadata.slot_mapping)
        _write(key, value, key_cache, value_cache, *writes)
    num_tokens, num_heads, head_dim = query.shape
    v_head_dim = value_cache.shape[3]
    block_size = key_cache.shape[1]
    whole_prompts = softcap is None and alibi_slopes is None  # else the scores of a long prompt would fill the memory
    plan_key = ("torch", block_size, sliding_window, chunk_size, whole_prompts)
    buckets = metadata.scratch.get(plan_key)
    if buckets is None:
        buckets = make_buckets(metadata, block_size, sliding_window, chunk_size, whole_prompts)
        metadata.scratch[plan_key] = buckets
    whole = buckets[0] if len(buckets) == 1 and out is None and not return_lse else None
    if whole is not None and (whole.rows is not None or whole.q_pos.numel() != num_tokens):
        whole = None
    is_plain = whole_prompts and sinks is None and head_dim == v_head_dim and query.device.type == "cpu"
    if whole is not None and is_plain and whole.q_pos.shape[1] == 1:
        return _decode_plain(whole, query, key_cache, value_cache, scale, metadata.scratch)
    kv = _KeysValues.of(key_cache, value_cache, key, value)
    if whole is not None and is_plain and whole.causal:
        return _prompt_plain(whole, query, kv, scale, metadata.scratch)
    options = _Options(scale, softcap, sinks, alibi_slopes, needs_lse=return_lse or sinks is not None)
    row_bytes = key_cache.shape[2] * (key_cache.shape[3] + v_head_dim) * key_cache.element_size()
    if whole is not None:
        num_seqs, span = whole.slots.shape
        if num_seqs == 1 or num_seqs * span * row_bytes <= _WORKSPACE_BYTES:  # the bucket is the result: no copy
            o, _ = _attend_bucket(whole, query, kv, options, metadata.scratch)
            return o.reshape(num_tokens, num_heads, v_head_dim).to(query.dtype)
    if out is None:
        out = query.new_empty(num_tokens, num_heads, v_head_dim)
    lse = None
    if return_lse:
        lse = query.new_full((num_tokens, num_heads), -torch.inf, dtype=torch.float32)
    for number, bucket in enumerate(buckets):
        num_seqs, span = bucket.slots.shape
        step = max(1, _WORKSPACE_BYTES // (span * row_bytes))
        for low in range(0, num_seqs, step):
            part = metadata.scratch.get((*plan_key, number, low, step))
            if part is None:
                part = metadata.scratch[(*plan_key, number, low, step)] = slice_bucket(bucket, low, low + step)
            o, row_lse = _attend_bucket(part, query, kv, options, metadata.scratch)
            _scatter(part, o, out)
            if lse is not None and row_lse is not None:
                _scatter(part, row_lse, lse)
    return out if lse is None else (out, lse)


@dataclass(frozen=True, slots=True)
class _KeysValues:
    """Where K and V are: all in the blocks, this step's also in new_key and new_value [num_tokens, num_kv_heads, ...]
    if those are given."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    new_key: torch.Tensor | None = None
    new_value: torch.Tensor | None = None

    @staticmethod
    def of(
        key_cache: torch.Tensor, value_cache: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None
    ) -> _KeysValues:
        """Leaves out new K/V of other dtypes than the blocks have: what was written is what counts."""
        if key is None or value is None or (key.dtype, value.dtype) != (key_cache.dtype, value_cache.dtype):
            return _KeysValues(key_cache, value_cache)
        return _KeysValues(key_cache, value_cache, key, value)


@dataclass(frozen=True, slots=True)
class _Options:
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    needs_lse: bool


def _prompt_plain(
    bucket: Bucket, query: torch.Tensor, kv: _KeysValues, scale: float, scratch: dict[Any, Any]
) -> torch.Tensor:
    """What `_attend_bucket` does for whole prompts, with nothing around the operations themselves: next to a model's
    weights everything else is cold in the caches."""
    q = bucket.rows_of(query).transpose(1, 2)
    k, v = _keys_values(bucket, False, kv, scratch)
    o = _sdpa(q, k, v, None, 0.0, True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return o.transpose(1, 2).flatten(0, 1)


def _decode_plain(
    bucket: Bucket,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    scratch: dict[Any, Any],
) -> torch.Tensor:
    """The same for one new token a sequence."""
    q = query.unflatten(1, (key_cache.shape[2], -1))
    key = ("torch decode", id(bucket), key_cache.shape[2:], key_cache.dtype, query.dtype, q.shape[2])
    parts = scratch.get(key)
    if parts is None:
        parts = scratch[key] = _decode_parts(bucket, q, key_cache, value_cache, scratch)
    flat_keys, flat_values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    out = torch.empty_like(q) if len(parts) > 1 else None
    for rows, index, keys, values, k, v, bias in parts:
        torch.index_select(flat_keys, 0, index, out=keys)
        torch.index_select(flat_values, 0, index, out=values)
        if out is None:
            return _sdpa(q, k, v, bias, scale=scale).flatten(1, 2)
        out[rows] = _sdpa(q[rows], k, v, bias, scale=scale)
    assert out is not None
    return out.flatten(1, 2)


def _decode_parts(
    bucket: Bucket,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scratch: dict[Any, Any],
) -> list[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Cuts a bucket into sequences whose gathered K/V stays in the caches of the cores that have just copied it.

    A part: rows of q, slots, where these go of K and of V, the same as SDPA takes them, bias.
    """
    num_seqs, span = bucket.slots.shape
    num_kv_heads, group = q.shape[1:3]
    row_bytes = num_kv_heads * (key_cache.shape[3] + value_cache.shape[3]) * key_cache.element_size()
    threads = torch.get_num_threads()
    count = max(1, _NEAR_BYTES // (span * row_bytes)) * threads
    if num_seqs * span * row_bytes <= _WHOLE_BYTES * threads:
        count = num_seqs
    parts = []
    for low in range(0, num_seqs, count):
        part = slice_bucket(bucket, low, low + count)
        scratch[("torch part", id(part))] = part  # an id is a key only as long as its object lives
        bias = None
        if part.hidden is not None:
            bias = _bias(part, True, q.dtype, group, num_kv_heads, None, scratch)
        index, keys, k = _prepare_gather(key_cache, part.slots, True, "key")
        _, values, v = _prepare_gather(value_cache, part.slots, True, "value")
        parts.append((slice(low, low + part.slots.shape[0]), index, keys, values, k, v, bias))
    return parts


def _attend_bucket(
    bucket: Bucket,
    query: torch.Tensor,
    kv: _KeysValues,
    options: _Options,
    scratch: dict[Any, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """-> out [num_seqs, query_len, num_kv_heads, group, v_head_dim]; if needed lse, the same without the last one."""
    num_seqs, query_len = bucket.q_pos.shape
    num_heads, num_kv_heads = query.shape[1], kv.key_cache.shape[2]
    group = num_heads // num_kv_heads
    packed = not bucket.causal and (num_seqs > 1 or query_len <= MAX_BATCHED_QUERY_LEN)
    q = bucket.rows_of(query)
    # All query heads that read a KV head are rows of one product; a sequence and a KV head are one problem.
    if packed and query_len == 1:
        q = q.squeeze(1).unflatten(1, (num_kv_heads, group))
    elif packed:
        q = q.unflatten(2, (num_kv_heads, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    else:
        q = q.transpose(1, 2)  # [num_seqs, num_heads, query_len, head_dim]
    k, v = _keys_values(bucket, packed, kv, scratch)
    bias = _bias(bucket, packed, query.dtype, group, num_kv_heads, options.alibi_slopes, scratch)
    o, row_lse = _attend(q, k, v, bias, bucket.causal, options)
    if packed and query_len == 1:
        o = o.unsqueeze(1)
    elif packed:
        o = o.view(num_seqs, num_kv_heads, query_len, group, -1).permute(0, 2, 1, 3, 4)
    else:
        o = o.transpose(1, 2).unflatten(2, (num_kv_heads, group))
    if row_lse is None:
        return o, None
    if packed:
        row_lse = row_lse.view(num_seqs, num_kv_heads, query_len, group).permute(0, 2, 1, 3)
    else:
        row_lse = row_lse.transpose(1, 2).unflatten(2, (num_kv_heads, group))
    if options.sinks is not None:
        sinks = options.sinks.float().view(num_kv_heads, group)
        o = o * torch.sigmoid(row_lse - sinks).unsqueeze(-1)
        row_lse = torch.logaddexp(row_lse, sinks)
    return o, row_lse


def _keys_values(
    bucket: Bucket, packed: bool, kv: _KeysValues, scratch: dict[Any, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> K, V [num_seqs, num_kv_heads, span, (v_)head_dim]"""
    if bucket.causal and kv.new_key is not None and kv.new_value is not None:
        # A prompt without a prefix: its keys and values are this step's, all of them and in order.
        return bucket.rows_of(kv.new_key).transpose(1, 2), bucket.rows_of(kv.new_value).transpose(1, 2)
    return (
        _gather(kv.key_cache, bucket, packed, "key", scratch),
        _gather(kv.value_cache, bucket, packed, "value", scratch),
    )


def _scatter(bucket: Bucket, values: torch.Tensor, out: torch.Tensor) -> None:
    """values [num_seqs, query_len, num_kv_heads, group, ...] to the bucket's rows of [num_tokens, num_heads, ...]."""
    if bucket.rows is None:
        rows = out[bucket.first_row : bucket.first_row + values.shape[0] * values.shape[1]]
        rows.view(values.shape).copy_(values)
        return
    values, rows = values.flatten(2, 3).flatten(0, 1), bucket.rows.flatten()
    if bucket.kept is not None:
        values, rows = values.index_select(0, bucket.kept), rows.index_select(0, bucket.kept)
    out.index_copy_(0, rows, values.to(out.dtype))


def _gather(cache: torch.Tensor, bucket: Bucket, packed: bool, name: str, scratch: dict[Any, Any]) -> torch.Tensor:
    """The bucket's slots of a cache [num_blocks, block_size, num_kv_heads, dim], in a workspace that all calls of this
    thread share -> [num_seqs, num_kv_heads, span, dim]."""
    key = ("torch gather", id(bucket), packed, name, cache.shape[2:], cache.dtype)
    prepared = scratch.get(key)
    if prepared is None:
        prepared = scratch[key] = _prepare_gather(cache, bucket.slots, packed, name)
    index, target, gathered = prepared
    torch.index_select(cache.view(-1, *target.shape[1:]), 0, index, out=target)
    return gathered


def _prepare_gather(
    cache: torch.Tensor, slots: torch.Tensor, packed: bool, name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows to take, where to (rows as they lie in the cache), and the same as [num_seqs, num_kv_heads, span, dim]."""
    heads, dim = cache.shape[2:]
    buffers: dict[Any, torch.Tensor] = _local.__dict__.setdefault("buffers", {})
    buffer = buffers.get((name, cache.dtype, cache.device))
    needed = slots.numel() * heads * dim
    if buffer is None or buffer.numel() < needed:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be used outside it
            buffer = buffers[(name, cache.dtype, cache.device)] = cache.new_empty(needed)
    if packed:
        target = buffer[:needed].view(-1, heads, dim)
        return slots.flatten(), target, target.unflatten(0, slots.shape).transpose(1, 2)
    # Each head's keys are gathered to one place: many queries read them, and products run faster on dense rows.
    index = slots[:, None] * heads + torch.arange(heads, device=slots.device)[:, None]
    target = buffer[:needed].view(-1, dim)
    return index.flatten(), target, target.unflatten(0, index.shape)


def _bias(
    bucket: Bucket,
    packed: bool,
    dtype: torch.dtype,
    group: int,
    num_kv_heads: int,
    alibi_slopes: torch.Tensor | None,
    scratch: dict[Any, Any],
) -> torch.Tensor | None:
    """What is added to the scores: -inf where hidden, ALiBi. Broadcasts to [batch, heads, rows, span]."""
    if bucket.hidden is None and alibi_slopes is None:
        return None
    key = ("torch bias", id(bucket), packed, dtype, group)
    mask = scratch.get(key)
    if mask is None and bucket.hidden is not None:
        mask = torch.zeros(bucket.hidden.shape, dtype=dtype, device=bucket.hidden.device)
        mask.masked_fill_(bucket.hidden, -torch.inf)
        if packed and mask.shape[1] == 1:
            mask = mask.unsqueeze(1).expand(-1, -1, group, -1)
        elif packed:
            mask = mask.repeat_interleave(group, dim=1).unsqueeze(1)
        else:
            mask = mask.unsqueeze(1)
        scratch[key] = mask
    if alibi_slopes is None:
        return mask
    distance = (bucket.k_pos[:, None, :] - bucket.q_pos[:, :, None]).float()  # [num_seqs, query_len, span]
    slopes = alibi_slopes.float().view(num_kv_heads, group)
    if packed:
        bias = slopes[None, :, None, :, None] * distance[:, None, :, None, :]
        bias = bias.flatten(2, 3)  # [num_seqs, num_kv_heads, query_len * group, span]
    else:
        bias = slopes.view(1, -1, 1, 1) * distance[:, None]  # [num_seqs, num_heads, query_len, span]
    if bucket.causal:
        bias = bias.masked_fill(distance > 0, -torch.inf)
    return bias if mask is None else bias + mask


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool, options: _Options
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [a, b, rows, head_dim], k, v [a, b // group, span, (v_)head_dim], where `group` heads of q share one of k
    -> out [a, b, rows, v_head_dim], log-sum-exp [a, b, rows] if that is needed."""
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    if options.softcap is not None or q.device.type != "cpu":
        return _attend_unfused(q, k, v, bias, causal, options)
    if head_dim < v_head_dim:  # the fused kernel wants equal sizes; zeros change no product
        q, k = (torch.nn.functional.pad(x, (0, v_head_dim - head_dim)) for x in (q, k))
    elif v_head_dim < head_dim:
        v = torch.nn.functional.pad(v, (0, head_dim - v_head_dim))
    if bias is not None:
        causal = False
    if options.needs_lse:
        o, lse = _fused(q, k, v, 0.0, causal, attn_mask=bias, scale=options.scale)
    else:
        o, lse = _sdpa(q, k, v, bias, 0.0, causal, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]), None
    return (o if v_head_dim >= head_dim else o[..., :v_head_dim]), lse


def _attend_unfused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool, options: _Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in fp32 products, for scores that need more than a bias."""
    group = q.shape[1] // k.shape[1]
    k, v = (x if group == 1 else x.repeat_interleave(group, dim=1) for x in (k, v))
    q, k, v = (x.to(torch.float32, memory_format=torch.contiguous_format) for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(options.scale)
    if options.softcap is not None:
        scores.div_(options.softcap).tanh_().mul_(options.softcap)
    if bias is not None:
        scores += bias
    elif causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(future, -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.matmul(scores.sub_(lse.unsqueeze(-1)).exp_(), v), lse
