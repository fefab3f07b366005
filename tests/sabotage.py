"""Faults for `pytest --sabotage NAME` and `scripts/mutants.py`: a test that none of them breaks compares nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.kv_pool import KVPool
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.cache.prefix_cache import PrefixCache
from hf_paged.generation import paged_generate
from hf_paged.generation.decoder import PackedDecoder
from hf_paged.kernels import ops
from hf_paged.kernels.arguments import LayerKV, NewKV


def skip_copies(patch: pytest.MonkeyPatch) -> None:
    """Copy-on-write allocates the new block but skips the copy."""
    patch.setattr(KVPool, "copy_blocks", lambda self, copies: None)


def ignore_mask(patch: pytest.MonkeyPatch) -> None:
    """Left padding is treated as text."""
    prefill = PackedDecoder.prefill
    patch.setattr(PackedDecoder, "prefill", lambda self, ids, mask, *args: prefill(self, ids, None, *args))
    prepare = paged_generate.prepare_cache_for_generation

    def unmasked(function: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = prepare(function, model, args, kwargs)
        call = paged_generate._active(model)
        if call is not None and call.decoding is not None and call.decoding.decoder is None:
            model_kwargs = args[1] if len(args) > 1 else kwargs["model_kwargs"]
            model_kwargs["attention_mask"] = None
        return result

    patch.setattr(paged_generate, "prepare_cache_for_generation", unmasked)


def swap_parents(patch: pytest.MonkeyPatch) -> None:
    """A row that continues another row gets the K/V of the row before that one."""

    def swapped(rows: Sequence[int], count: int) -> list[int]:
        return [parent if parent == i else (parent - 1) % count for i, parent in enumerate(rows)]

    reorder, select = PackedDecoder.reorder, PagedKVCache.select_rows
    patch.setattr(PackedDecoder, "reorder", lambda self, parents: reorder(self, swapped(list(parents), len(self.rows))))
    patch.setattr(PagedKVCache, "select_rows", lambda self, rows: select(self, swapped(rows, self.num_rows)))


def lose_writes(patch: pytest.MonkeyPatch) -> None:
    """The K/V of every third slot never arrives."""
    write, attend = ops.write_kv, ops.paged_attention

    def lossy(new: NewKV, kv: LayerKV, slot_mapping: torch.Tensor, **kwargs: Any) -> None:
        kept = torch.where(slot_mapping % 3 == 1, -1, slot_mapping)
        lost = slot_mapping[slot_mapping % 3 == 1]
        for cache in kv.elements:
            cache.flatten(0, 1)[lost] = 0
        write(new, kv, kept, **kwargs)

    def attend_lossy(query: Any, kv: LayerKV, metadata: Any, options: Any, new: Any = None, **kwargs: Any) -> Any:
        if new is not None:
            lossy(new, kv, metadata.slot_mapping)
        return attend(query, kv, metadata, options, **kwargs)

    patch.setattr(ops, "write_kv", lossy)
    patch.setattr(ops, "paged_attention", attend_lossy)


FAULTS = {"copies": skip_copies, "mask": ignore_mask, "parents": swap_parents, "writes": lose_writes}


def stale_root(patch: pytest.MonkeyPatch) -> None:
    """Cached prefixes of the old weights are still found after a weight change."""
    patch.setattr(PrefixCache, "clear", lambda self: None)


def leak_blocks(patch: pytest.MonkeyPatch) -> None:
    """Every 500th sequence that is freed keeps its first block."""
    free, count = BlockManager.free, itertools.count(1)

    def leaky(self: BlockManager, seq_id: Any) -> None:
        if next(count) % 500 == 0 and self.block_table(seq_id):
            self.fork(seq_id, ("leaked", next(count)))
        free(self, seq_id)

    patch.setattr(BlockManager, "free", leaky)


SOAK_FAULTS = {"copies": skip_copies, "root": stale_root, "leak": leak_blocks}
