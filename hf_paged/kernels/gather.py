"""The torch implementation of the operations in `kernels.ops`, for any device; on a CPU it needs no compiler.

Attention gathers the K/V of a bucket of sequences of similar lengths into a workspace, and computes each bucket in one
call of torch's fused attention. How a sequence is computed depends only on its own lengths, never on the rest of the
batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from hf_paged.kernels.arguments import Attention, LayerKV, NewKV, Result
from hf_paged.kernels.buckets import MAX_BATCHED_QUERY_LEN, Bucket, make_buckets, slice_bucket
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.quantised import NO_SCALES, dequantised, quantised

# Buckets are cut so that their gathered K/V takes about this much memory: it is then still in the CPU's caches.
_WORKSPACE_BYTES = 16 << 20
# A plain decode step that gathers more than _WHOLE_BYTES per core is cut into parts of _NEAR_BYTES, which stay in the
# caches of one core.
_WHOLE_BYTES, _NEAR_BYTES = 4 << 20, 768 << 10

_local = threading.local()
_sdpa = torch.nn.functional.scaled_dot_product_attention
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # also returns the log-sum-exp


def write_kv(new: NewKV, kv: LayerKV, slot_mapping: torch.Tensor) -> None:
    """See `ops.write_kv`."""
    _write(new, kv, *_without_padding(slot_mapping))


def _without_padding(slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The slots of tokens that are not padding, and the rows of these tokens (None: all rows)."""
    # Most steps have no padding, and then no row is copied.
    if slot_mapping.numel() == 0 or int(slot_mapping.min()) >= 0:
        return slot_mapping, None
    rows = (slot_mapping >= 0).nonzero().flatten()
    return slot_mapping[rows], rows


def _write(new: NewKV, kv: LayerKV, slots: torch.Tensor, rows: torch.Tensor | None) -> None:
    for cache, own, given in zip(kv.elements, kv.scales, new):
        x = given if rows is None else given[rows]
        if own is not None:
            place = slots // cache.shape[1], slots % cache.shape[1]
            small, own[place] = quantised(x, cache.dtype)
            # torch indexes no floats of eight bits, so they are moved as integers.
            cache.view(torch.int8)[place] = small.view(torch.int8)
        elif cache.is_contiguous():
            # In contiguous memory a slot's number is its row, so that nothing has to be divided.
            cache.flatten(0, 1).index_copy_(0, slots, x.to(cache.dtype))
        else:
            cache[slots // cache.shape[1], slots % cache.shape[1]] = x.to(cache.dtype)


def _take(cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """cache [num_blocks, block_size, num_kv_heads, dim], slots int64 [n] -> out [n, num_kv_heads, dim]."""
    if cache.is_contiguous():
        torch.index_select(cache.flatten(0, 1), 0, slots, out=out)
    else:
        out.copy_(cache[slots // cache.shape[1], slots % cache.shape[1]])


def copy_blocks(caches: list[torch.Tensor], copies: torch.Tensor, into: list[torch.Tensor]) -> None:
    """See `ops.copy_blocks`."""
    sources, targets = copies[:, 0].contiguous(), copies[:, 1].contiguous()
    for source, target in zip(caches, into):
        target.index_copy_(0, targets, source.index_select(0, sources))


# -- attention ----------------------------------------------------------------------------------------------------


def paged_attention(
    query: torch.Tensor,
    kv: LayerKV,
    metadata: AttentionMetadata,
    options: Attention,
    new: NewKV | None = None,
    out: torch.Tensor | None = None,
) -> Result:
    """See `ops.paged_attention`."""
    scratch = metadata.scratch
    if new is not None:
        # Once for all layers, because looking for padding reads all slots.
        if "torch writes" not in scratch:
            scratch["torch writes"] = _without_padding(metadata.slot_mapping)
        _write(new, kv, *scratch["torch writes"])
    # Only the fused attention can compute a long prompt at once: otherwise its scores would fill the memory.
    whole_prompts = options.softcap is None and options.alibi_slopes is None and options.distance_bias is None
    settings = (kv.key.shape[1], options.bounds, whole_prompts)
    buckets = scratch.get(("torch", settings))
    if buckets is None:
        buckets = scratch[("torch", settings)] = make_buckets(metadata, *settings)
    read = _KeysValues(kv, query.dtype, new)
    # Most decode steps are one bucket, whose result is the output itself.
    if len(buckets) == 1 and out is None and not options.return_lse:
        result = _attend_step(buckets[0], query, read, options, scratch)
        if result is not None:
            return result
    num_tokens, num_heads, _ = query.shape
    if out is None:
        out = query.new_empty(num_tokens, num_heads, kv.value.shape[3])
    lse = None
    if options.return_lse:
        lse = query.new_full((num_tokens, num_heads), -torch.inf, dtype=torch.float32)
    for part in _parts(buckets, settings, read.bytes_per_token, scratch):
        o, row_lse = _attend_bucket(part, query, read, options, scratch)
        _scatter(part, o, out)
        if lse is not None and row_lse is not None:
            _scatter(part, row_lse, lse)
    return out if lse is None else (out, lse)


def _attend_step(
    bucket: Bucket, query: torch.Tensor, kv: _KeysValues, options: Attention, scratch: dict[Any, Any]
) -> torch.Tensor | None:
    """The result [num_tokens, num_heads, v_head_dim] of a step whose rows all belong to one bucket, without a copy.

    None if the bucket has other rows, or if it must be cut because its K/V is too large.
    """
    num_tokens, num_heads, head_dim = query.shape
    if bucket.rows is not None or bucket.q_pos.numel() != num_tokens:
        return None
    # Nothing but a scale and a mask, so that the fused attention alone gives the result.
    is_plain = options.softcap is None and options.has_numbers_only
    is_decode = bucket.q_pos.shape[1] == 1 and kv.blocks.scales == NO_SCALES
    if is_plain and is_decode and head_dim == kv.blocks.value.shape[3] and query.device.type == "cpu":
        return _decode_plain(bucket, query, kv, options.scale, scratch)
    num_seqs, span = bucket.slots.shape
    # A single sequence cannot be cut, however large it is.
    if num_seqs > 1 and num_seqs * span * kv.bytes_per_token > _WORKSPACE_BYTES:
        return None
    o, _ = _attend_bucket(bucket, query, kv, options, scratch)
    return o.reshape(num_tokens, num_heads, -1).to(query.dtype)


def _parts(
    buckets: list[Bucket], settings: tuple[Any, ...], bytes_per_token: int, scratch: dict[Any, Any]
) -> Iterator[Bucket]:
    """The buckets, cut so that the gathered K/V of each part fits the workspace."""
    for number, bucket in enumerate(buckets):
        num_seqs, span = bucket.slots.shape
        step = max(1, _WORKSPACE_BYTES // (span * bytes_per_token))
        for low in range(0, num_seqs, step):
            key = ("torch part", settings, number, low, step)
            part = scratch.get(key)
            if part is None:
                part = scratch[key] = slice_bucket(bucket, low, low + step)
            yield part


class _KeysValues(NamedTuple):
    """The blocks with all K and V, the dtype of the reading attention, and the step's new K and V, if the caller gave
    any."""

    blocks: LayerKV
    dtype: torch.dtype
    new: NewKV | None

    @property
    def bytes_per_token(self) -> int:
        _, _, num_kv_heads, head_dim = self.blocks.key.shape
        return num_kv_heads * (head_dim + self.blocks.value.shape[3]) * self.dtype.itemsize


def _decode_plain(
    bucket: Bucket, query: torch.Tensor, kv: _KeysValues, scale: float, scratch: dict[Any, Any]
) -> torch.Tensor:
    """Compute `_attend_bucket` for one new token per sequence and plain options, in few operations. In a forward,
    reading the weights evicts all else from the CPU's caches, so each operation costs more."""
    shape, dtype = kv.blocks.key.shape[2:], kv.blocks.key.dtype
    q = query.unflatten(1, (shape[0], -1))
    # The bucket lives in the same scratch as this key, so no other one gets its id meanwhile.
    key = ("torch decode", id(bucket), shape, dtype, query.dtype, q.shape[2])
    parts = scratch.get(key)
    if parts is None:
        parts = scratch[key] = _decode_parts(bucket, q, kv, scratch)
    out = torch.empty_like(q) if len(parts) > 1 else None
    for rows, slots, keys, values, k, v, bias in parts:
        _take(kv.blocks.key, slots, keys)
        _take(kv.blocks.value, slots, values)
        if out is None:
            return _sdpa(q, k, v, bias, scale=scale).flatten(1, 2)
        out[rows] = _sdpa(q[rows], k, v, bias, scale=scale)
    assert out is not None
    return out.flatten(1, 2)


class _DecodePart(NamedTuple):
    """Some sequences of a decode step. `keys` and `values` are the workspace as `index_select` fills it; `k` and `v`
    are views of it as attention reads it."""

    rows: slice
    slots: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None


def _decode_parts(bucket: Bucket, q: torch.Tensor, kv: _KeysValues, scratch: dict[Any, Any]) -> list[_DecodePart]:
    """Cuts a bucket into parts whose gathered K/V stays in the caches of the cores that have just copied it."""
    num_seqs, span = bucket.slots.shape
    num_kv_heads, group = q.shape[1:3]
    threads = torch.get_num_threads()
    # Each thread attends to sequences of its own, so a part has as many for each.
    count = max(1, _NEAR_BYTES // (span * kv.bytes_per_token)) * threads
    if num_seqs * span * kv.bytes_per_token <= _WHOLE_BYTES * threads:
        count = num_seqs
    parts = []
    for low in range(0, num_seqs, count):
        part = slice_bucket(bucket, low, low + count)
        scratch[("torch part", id(part))] = part  # an id is a valid key only while its object lives
        bias = None
        if part.hidden is not None:
            bias = _bias(part, True, q.dtype, group, num_kv_heads, None, scratch)
        slots, keys, k = _prepare_gather(kv.blocks.key, part.slots, True, "key")
        _, values, v = _prepare_gather(kv.blocks.value, part.slots, True, "value")
        parts.append(_DecodePart(slice(low, low + part.slots.shape[0]), slots, keys, values, k, v, bias))
    return parts


def _attend_bucket(
    bucket: Bucket,
    query: torch.Tensor,
    kv: _KeysValues,
    options: Attention,
    scratch: dict[Any, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """-> out [num_seqs, query_len, num_kv_heads, group, v_head_dim]; log-sum-exp [num_seqs, query_len, num_kv_heads,
    group], or None if it is not needed."""
    num_seqs, query_len = bucket.q_pos.shape
    num_heads, num_kv_heads = query.shape[1], kv.blocks.key.shape[2]
    group = num_heads // num_kv_heads
    # The causal mask counts rows, so a group's heads stay apart there. From MAX_BATCHED_QUERY_LEN tokens on, each head
    # has rows enough for a product of its own.
    packed = not bucket.causal and (num_seqs > 1 or query_len <= MAX_BATCHED_QUERY_LEN)
    q = bucket.rows_of(query)
    # packed: the query heads that read one KV head are rows of one product, one product per sequence and KV head.
    if packed and query_len == 1:
        q = q.squeeze(1).unflatten(1, (num_kv_heads, group))
    elif packed:
        q = q.unflatten(2, (num_kv_heads, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    else:
        q = q.transpose(1, 2)  # [num_seqs, num_heads, query_len, head_dim]
    k, v = _keys_values(bucket, packed, kv, scratch)
    bias = _bias(bucket, packed, query.dtype, group, num_kv_heads, options, scratch)
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
    # A sink is one more term of the sum, without a value: it shrinks the rest by the share that it takes.
    if options.sinks is not None:
        sinks = options.sinks.float().view(num_kv_heads, group)
        o = o * torch.sigmoid(row_lse - sinks).unsqueeze(-1)
        row_lse = torch.logaddexp(row_lse, sinks)
    return o, row_lse


def _keys_values(
    bucket: Bucket, packed: bool, kv: _KeysValues, scratch: dict[Any, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> K, V [num_seqs, num_kv_heads, span, (v_)head_dim]"""
    # The K/V of a prompt without cached tokens is exactly that of the step's tokens, in order. If the cache has another
    # dtype, attention must read the rounded values.
    (key_cache, value_cache, scales), new = kv.blocks, kv.new
    if bucket.causal and new is not None and (new.key.dtype, new.value.dtype) == (key_cache.dtype, value_cache.dtype):
        return bucket.rows_of(new.key).transpose(1, 2), bucket.rows_of(new.value).transpose(1, 2)
    return (
        _gather(key_cache, scales.key, kv.dtype, bucket, packed, "key", scratch),
        _gather(value_cache, scales.value, kv.dtype, bucket, packed, "value", scratch),
    )


def _scatter(bucket: Bucket, values: torch.Tensor, out: torch.Tensor) -> None:
    """Writes values [num_seqs, query_len, num_kv_heads, group, ...] to the bucket's rows of out [num_tokens, num_heads,
    ...]."""
    if bucket.rows is None:
        rows = out[bucket.first_row : bucket.first_row + values.shape[0] * values.shape[1]]
        rows.view(values.shape).copy_(values)
        return
    values, rows = values.flatten(2, 3).flatten(0, 1), bucket.rows.flatten()
    if bucket.kept is not None:
        values, rows = values.index_select(0, bucket.kept), rows.index_select(0, bucket.kept)
    out.index_copy_(0, rows, values.to(out.dtype))


def _gather(
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    dtype: torch.dtype,
    bucket: Bucket,
    packed: bool,
    name: str,
    scratch: dict[Any, Any],
) -> torch.Tensor:
    """The bucket's slots of a cache [num_blocks, block_size, num_kv_heads, dim] -> [num_seqs, num_kv_heads, span, dim],
    in this thread's workspace, which the next call overwrites. With scales: multiplied by them, in `dtype`."""
    if scales is not None:
        place = bucket.slots // cache.shape[1], bucket.slots % cache.shape[1]
        rows = cache.view(torch.int8)[place].view(cache.dtype)
        return dequantised(rows, scales[place], dtype).transpose(1, 2)
    # The other layers have K/V of the same shapes in other memory, so that index and target serve them too.
    key = ("torch gather", id(bucket), packed, name, cache.shape[2:], cache.dtype)
    prepared = scratch.get(key)
    if prepared is None:
        prepared = scratch[key] = _prepare_gather(cache, bucket.slots, packed, name)
    index, target, gathered = prepared
    if packed:
        _take(cache, index, target)
    elif cache.is_contiguous():
        torch.index_select(cache.view(-1, cache.shape[3]), 0, index, out=target)
    # `index_select` takes rows of one flat view, which only contiguous memory has.
    else:
        slots, heads = index // cache.shape[2], index % cache.shape[2]
        target.copy_(cache[slots // cache.shape[1], slots % cache.shape[1], heads])
    return gathered


def _prepare_gather(
    cache: torch.Tensor, slots: torch.Tensor, packed: bool, name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For `index_select`: the indices and its target in the workspace; and the target as [num_seqs, num_kv_heads, span,
    dim]."""
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
    # Gather each head's keys contiguously: many queries read them, and products are faster on contiguous rows.
    index = slots[:, None] * heads + torch.arange(heads, dtype=torch.int64, device=slots.device)[:, None]
    target = buffer[:needed].view(-1, dim)
    return index.flatten(), target, target.unflatten(0, index.shape)


def _bias(
    bucket: Bucket,
    packed: bool,
    dtype: torch.dtype,
    group: int,
    num_kv_heads: int,
    options: Attention | None,
    scratch: dict[Any, Any],
) -> torch.Tensor | None:
    """The bias of the scores: -inf for hidden keys, plus what `options` add by distance. Broadcasts to [batch, heads,
    rows, span]; None: zero.

    packed: as in `_attend_bucket`, heads are KV heads, and rows are queries x group.
    """
    slopes, table = (None, None) if options is None else (options.alibi_slopes, options.distance_bias)
    if bucket.hidden is None and slopes is None and table is None:
        return None
    # Hidden keys are the same in all layers of the step; what options add may differ, and is made anew.
    key = ("torch bias", id(bucket), packed, dtype, group)
    mask = scratch.get(key)
    if mask is None and bucket.hidden is not None:
        mask = torch.zeros(bucket.hidden.shape, dtype=dtype, device=bucket.hidden.device)
        mask.masked_fill_(bucket.hidden, -torch.inf)
        if packed and mask.shape[1] == 1:
            # With one query the group's rows have equal masks, so a view serves.
            mask = mask.unsqueeze(1).expand(-1, -1, group, -1)
        elif packed:
            mask = mask.repeat_interleave(group, dim=1).unsqueeze(1)
        else:
            mask = mask.unsqueeze(1)
        scratch[key] = mask
    if slopes is None and table is None:
        return mask
    distance = bucket.k_pos[:, None, :] - bucket.q_pos[:, :, None]  # [num_seqs, query_len, span]
    added: list[torch.Tensor] = []  # [num_seqs, num_heads, query_len, span] each
    if slopes is not None:
        added.append(slopes.float().view(1, -1, 1, 1) * distance[:, None])
    if table is not None:
        # Keys ahead and padding have no entry of the table; they are hidden, so any entry will do.
        near = (-distance).clamp_(0, table.shape[1] - 1)
        added.append(table.float()[:, near].transpose(0, 1))
    bias = added[0] if len(added) == 1 else added[0] + added[1]
    if packed:  # [num_seqs, num_kv_heads, query_len * group, span]
        bias = bias.unflatten(1, (num_kv_heads, group)).transpose(2, 3).flatten(2, 3)
    # Beside a bias, torch applies no causal mask of its own.
    if bucket.causal:
        bias = bias.masked_fill((distance > 0)[:, None], -torch.inf)
    return bias if mask is None else bias + mask


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool, options: Attention
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [a, b, rows, head_dim], k and v [a, b // group, span, (v_)head_dim]; `group` heads of q read one head of k
    -> out [a, b, rows, v_head_dim]; log-sum-exp [a, b, rows], or None if it is not needed."""
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    if options.softcap is not None or q.device.type != "cpu":
        return _attend_unfused(q, k, v, bias, causal, options)
    if head_dim < v_head_dim:  # the fused attention requires equal sizes; zeros change no product
        q, k = (torch.nn.functional.pad(x, (0, v_head_dim - head_dim)) for x in (q, k))
    elif v_head_dim < head_dim:
        v = torch.nn.functional.pad(v, (0, head_dim - v_head_dim))
    # torch refuses both; the bias hides later keys already.
    if bias is not None:
        causal = False
    if options.return_lse or options.sinks is not None:
        o, lse = _fused(q, k, v, 0.0, causal, attn_mask=bias, scale=options.scale)
    else:
        o, lse = _sdpa(q, k, v, bias, 0.0, causal, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]), None
    return (o if v_head_dim >= head_dim else o[..., :v_head_dim]), lse


def _attend_unfused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool, options: Attention
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in separate fp32 operations: for softcap, and for devices without the fused call."""
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
