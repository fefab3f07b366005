"""Random ragged batches over a pool whose unowned slots are NaN, for the tests of all kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_paged.kernels import ops
from hf_paged.kernels.arguments import Attention, LayerKV, NewKV
from hf_paged.kernels.bounds import Bounds
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.quantised import DTYPES, NO_SCALES, Scales, dequantised, quantised


def attention_options(*, sliding_window: int | None = None, chunk_size: int | None = None, **others: Any) -> Attention:
    return Attention(bounds=Bounds(sliding_window, chunk_size), **others)


def attention_of(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, metadata: AttentionMetadata, *,
    scales: Scales = NO_SCALES, key: Any = None, value: Any = None, out: Any = None, impl: str | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """`ops.paged_attention` with arguments by name."""
    kv, new = LayerKV(key_cache, value_cache, scales), None if key is None else NewKV(key, value)
    return ops.paged_attention(query, kv, metadata, attention_options(**options), new, out=out, impl=impl)


def write_new(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, *, scales: Scales = NO_SCALES, **options: Any,
) -> None:  # fmt: skip
    """The same for `ops.write_kv`."""
    ops.write_kv(NewKV(key, value), LayerKV(key_cache, value_cache, scales), slot_mapping, **options)


@dataclass(frozen=True)
class Case:
    """lens: (query_len, seq_len) of each sequence. shared: number of leading blocks that all sequences share.
    ahead: every other run of so many positions is of tokens that attend to one another both ways."""

    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 32
    v_head_dim: int | None = None
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    chunk_size: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    distance_bias: bool = False
    shared: int = 0
    ahead: int | None = None
    consecutive: bool = False
    strided: bool = False
    seed: int = 0


@dataclass
class Batch:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, impl: str, **kwargs: Any) -> Any:
        metadata = replace(self.metadata, scratch={})
        return attention_of(self.query, self.key_cache, self.value_cache, metadata, impl=impl, **self.options, **kwargs)

    def only(self, seqs: list[int]) -> Batch:
        """The batch restricted to these sequences."""
        m = self.metadata
        starts = m.query_start_loc.tolist()
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in seqs])
        counts = torch.tensor([0] + [starts[i + 1] - starts[i] for i in seqs])
        metadata = AttentionMetadata(
            block_tables=m.block_tables[seqs],
            seq_lens=m.seq_lens[seqs],
            query_start_loc=counts.cumsum(0).to(torch.int32),
            slot_mapping=m.slot_mapping[rows],
            reach=None if m.reach is None else m.reach[rows],
            max_query_len=int(counts.max()),
            max_seq_len=int(m.seq_lens[seqs].max()),
        )
        return Batch(self.query[rows], self.key_cache, self.value_cache, metadata, self.options)

    def rows(self, seq: int) -> slice:
        starts = self.metadata.query_start_loc.tolist()
        return slice(starts[seq], starts[seq + 1])


def make_batch(case: Case, device: str = "cpu") -> Batch:
    generator = torch.Generator().manual_seed(case.seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    num_heads, num_kv_heads = case.heads
    v_head_dim = case.head_dim if case.v_head_dim is None else case.v_head_dim
    bs = case.block_size
    needed = [-(-seq_len // bs) for _, seq_len in case.lens]
    total = case.shared + sum(max(0, n - case.shared) for n in needed) + 3
    ids = torch.arange(total) if case.consecutive else torch.randperm(total, generator=generator)
    table = torch.full((len(case.lens), max([*needed, 1]) + 1), -1, dtype=torch.int32)
    key_cache = torch.full((total, bs, num_kv_heads, case.head_dim), torch.nan)
    value_cache = torch.full((total, bs, num_kv_heads, v_head_dim), torch.nan)
    common, rest = ids[: case.shared], ids[case.shared :].tolist()
    slots, reach = [], []
    for i, (query_len, seq_len) in enumerate(case.lens):
        private = max(0, needed[i] - case.shared)
        blocks = torch.cat([common[: needed[i]], torch.tensor(rest[:private], dtype=torch.long)])
        rest = rest[private:]
        table[i, : needed[i]] = blocks.to(torch.int32)
        position = torch.arange(seq_len)
        where = (blocks[position // bs], position % bs) if seq_len else (position, position)
        fresh = key_cache[where].isnan().any(-1).any(-1)
        where = (where[0][fresh], where[1][fresh])
        key_cache[where] = randn(int(fresh.sum()), num_kv_heads, case.head_dim)
        value_cache[where] = randn(int(fresh.sum()), num_kv_heads, v_head_dim)
        if case.sliding_window is not None:  # blocks outside every query's window have been freed
            dropped = max(0, seq_len - query_len - case.sliding_window + 1) // bs
            if dropped > case.shared:
                key_cache[table[i, case.shared : dropped].long()] = torch.nan
                table[i, :dropped] = -1
        slots.append(blocks[position // bs] * bs + position % bs if seq_len else position)
        slots[-1] = slots[-1][seq_len - query_len :]
        own = position[seq_len - query_len :]
        if case.ahead is not None:
            runs = own // case.ahead
            last = ((runs + 1) * case.ahead - 1).clamp(max=seq_len - 1)
            reach.append(torch.where(runs % 2 == 1, last, own))
    query_lens = torch.tensor([0] + [q for q, _ in case.lens])
    num_tokens = int(query_lens.sum())
    query = randn(num_tokens, num_heads, case.head_dim)
    if case.strided:  # as after `qkv.unbind` and a transpose, and values that are a part of the keys' memory
        query = randn(num_heads, num_tokens, 3, case.head_dim)[:, :, 1].transpose(0, 1)
        value_cache = torch.cat([value_cache, value_cache], -1)
    options: dict[str, Any] = {"scale": case.head_dim**-0.5}
    for name in ("sliding_window", "chunk_size", "softcap"):
        if getattr(case, name) is not None:
            options[name] = getattr(case, name)
    if case.sinks:
        options["sinks"] = randn(num_heads).to(device)
    if case.alibi:
        options["alibi_slopes"] = (2.0 ** -torch.arange(1, num_heads + 1)).to(device)
    if case.distance_bias:
        options["distance_bias"] = randn(num_heads, max(s for _, s in case.lens)).to(device)
    metadata = AttentionMetadata(
        block_tables=table.to(device),
        seq_lens=torch.tensor([s for _, s in case.lens], dtype=torch.int32, device=device),
        query_start_loc=query_lens.cumsum(0).to(torch.int32).to(device),
        slot_mapping=torch.cat(slots).to(device),
        reach=None if case.ahead is None else torch.cat(reach).to(device, torch.int32),
        max_query_len=int(query_lens.max()),
        max_seq_len=max(s for _, s in case.lens),
    )
    return Batch(
        query.to(device, case.dtype),
        key_cache.to(device, case.dtype),
        value_cache.to(device, case.dtype)[..., :v_head_dim],
        metadata,
        options,
    )


def stored(batch: Batch, names: tuple[str | None, str | None]) -> Batch:
    """The batch with its K/V in eight bits; scales of unowned slots are NaN."""
    caches, scales = [batch.key_cache, batch.value_cache], [None, None]
    for i, name in enumerate(names):
        if name is not None:
            caches[i], scales[i] = quantised(caches[i].nan_to_num(nan=torch.inf), DTYPES[name])  # type: ignore[call-overload]
            scales[i][scales[i].isinf()] = torch.nan  # type: ignore[index]
    return replace(
        batch, key_cache=caches[0], value_cache=caches[1], options=batch.options | {"scales": Scales(*scales)}
    )


def exact(batch: Batch) -> Batch:
    """What the elements and scales mean, in fp64."""
    scales = batch.options["scales"]
    caches = (dequantised(c, s, torch.float64) for c, s in zip((batch.key_cache, batch.value_cache), scales))
    options = {name: value for name, value in batch.options.items() if name != "scales"}
    return Batch(batch.query.double(), *caches, batch.metadata, options)


def unwritten(batch: Batch) -> tuple[Batch, dict[str, torch.Tensor]]:
    """The batch before its step's K/V is written, and that K/V with the strides of a model's tensors."""
    slots = batch.metadata.slot_mapping
    caches = [batch.key_cache.clone(), batch.value_cache.clone()]
    new_kv = {}
    for name, cache in zip(("key", "value"), caches):
        flat = cache.flatten(0, 1)
        new_kv[name] = torch.stack([flat[slots]] * 2, dim=2)[:, :, 1]
        flat[slots] = torch.nan
    return replace(batch, key_cache=caches[0], value_cache=caches[1]), new_kv


def check(batch: Batch, impl: str) -> None:
    """Compare with the reference: fp32 closely, half precision within twice the error of rounding the result."""
    expected, expected_lse = batch.run("reference", return_lse=True)
    exact, exact_lse = expected.double(), expected_lse.double()
    actual, lse = batch.run(impl, return_lse=True)
    assert actual.dtype == batch.query.dtype and lse.dtype == torch.float32
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1.6e-2}[batch.query.dtype]
    torch.testing.assert_close(actual.double(), exact, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), exact_lse, atol=tolerance, rtol=tolerance)
    before, new_kv = unwritten(batch)
    written = before.run(impl, **new_kv)
    torch.testing.assert_close(written.double(), exact, atol=tolerance, rtol=tolerance)
    for after, whole in ((before.key_cache, batch.key_cache), (before.value_cache, batch.value_cache)):
        assert torch.equal(after.nan_to_num(nan=7.0), whole.nan_to_num(nan=7.0))
