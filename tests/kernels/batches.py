"""Ragged batches for the kernel tests: random lengths and tables, NaN in every slot that no query may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_paged.kernels import reference
from hf_paged.kernels.metadata import AttentionMetadata


@dataclass
class Batch:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata]:
        return self.query, self.key_cache, self.value_cache, self.metadata

    @property
    def rows(self) -> int:
        """Query rows that belong to a sequence; what is past them is undefined."""
        return int(self.metadata.query_start_loc[-1])


def make_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    v_head_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    first_key: int = 0,
    shared_blocks: int = 0,
    seed: int = 0,
) -> Batch:
    """lengths: (query_len, seq_len) a sequence. Blocks are a random permutation of the pool.

    Every slot that is not a token of a sequence holds NaN. Blocks wholly before `first_key` (out of every query's
    window) are -1 in the tables. The first `shared_blocks` blocks are the same for all sequences long enough.
    """
    num_heads, num_kv_heads = heads
    v_head_dim = v_head_dim or head_dim
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-seq_len // block_size) for _, seq_len in lengths]
    num_blocks = sum(counts) + 3
    ids = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(lengths), max([1, *counts])), 2**30, dtype=torch.int32)
    caches = [torch.full((num_blocks, block_size, num_kv_heads, d), float("nan")) for d in (head_dim, v_head_dim)]
    common = [ids.pop() for _ in range(min(counts))][:shared_blocks] if shared_blocks else []
    for i, ((_, seq_len), count) in enumerate(zip(lengths, counts)):
        own = [*common, *(ids.pop() for _ in range(count - len(common)))] if count else []
        for j, block in enumerate(own):
            tables[i, j] = block
            used = min(block_size, seq_len - j * block_size)
            if (j + 1) * block_size <= first_key:
                tables[i, j] = -1
                continue
            for cache in caches:
                if j >= len(common) or i == 0:
                    cache[block, :used] = torch.randn(used, *cache.shape[2:], generator=generator)
                used_from = max(0, first_key - j * block_size)
                cache[block, :used_from] = float("nan")
    starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).to(torch.int32)
    num_tokens = int(starts[-1])
    query = torch.randn(num_tokens, num_heads, head_dim, generator=generator)
    metadata = AttentionMetadata(
        block_tables=tables.to(device),
        seq_lens=torch.tensor([s for _, s in lengths], dtype=torch.int32, device=device),
        query_start_loc=starts.to(device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        max_query_len=max(q for q, _ in lengths),
        max_seq_len=max(s for _, s in lengths),
    )
    key_cache, value_cache = (cache.to(device=device, dtype=dtype) for cache in caches)
    return Batch(query.to(device=device, dtype=dtype), key_cache, value_cache, metadata)


TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_matches_reference(module: object, batch: Batch, **options: object) -> None:
    """`module.paged_attention` gives the output and the log-sum-exp of the reference, within the dtype's rounding."""
    options.setdefault("scale", batch.query.shape[-1] ** -0.5)
    expected, expected_lse = reference.paged_attention(*batch.tensors, return_lse=True, **options)
    actual, lse = module.paged_attention(*batch.tensors, return_lse=True, **options)  # type: ignore[attr-defined]
    tolerance = TOLERANCE[batch.query.dtype]
    rows = batch.rows
    assert expected[:rows].isfinite().all()
    torch.testing.assert_close(actual[:rows], expected[:rows], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse[:rows], expected_lse[:rows], atol=max(tolerance, 1e-4), rtol=1e-4)
