"""Finds the memory in which a number of sequences run at once, of the same parts that size an engine's memory."""

from __future__ import annotations

from bisect import bisect_left
from math import ceil

from hf_paged.annotations import Model
from hf_paged.config import CacheConfig, SchedulerConfig, Switches
from hf_paged.features.executors import measured
from hf_paged.generation.engine.sizing import Shares, generating_model
from hf_paged.model.devices import device_of
from hf_paged.model.support import refuse_unsupported
from hf_paged.sockets import Executor

# No address space has so many.
_MOST_BYTES = 1 << 60


def memory_for(model: Model, num_seqs: int, num_tokens: int) -> int:
    """Return the least `CacheConfig.memory` in bytes in which so many sequences of so many tokens run at once.

    None is preempted or waits, whatever part of its tokens is the prompt. `max_num_seqs` is taken to be `num_seqs`, all
    else to have its default. Raises what an engine raises for the model.
    """
    model = generating_model(model)
    refuse_unsupported(model, by_engine=True)
    scheduler = SchedulerConfig(max_num_seqs=num_seqs).for_device(device_of(model).type)
    executor, _, _ = measured(model, CacheConfig(), scheduler, Switches(prepack=False, fuse=False))
    return bisect_left(range(_MOST_BYTES), True, key=lambda size: _suffices(executor, scheduler, size, num_tokens))


def _suffices(executor: Executor, scheduler: SchedulerConfig, size: int, num_tokens: int) -> bool:
    try:
        shares = Shares(executor, CacheConfig(memory=size), scheduler)
        num_blocks = shares.num_blocks() if executor.memory.groups else 0
    except ValueError:  # it holds no block, or no state
        return False
    num_seqs, block_size, beside = scheduler.max_num_seqs, executor.memory.block_size, shares.beside
    length = -(-num_tokens // block_size)
    each = sum(group.kind.most_blocks(length, block_size) for group in executor.memory.groups)
    # The last request is admitted only if the watermark stays free beside it.
    needed = num_seqs * each + ceil(num_seqs * beside.blocks) + int(scheduler.watermark * num_blocks)
    return needed <= num_blocks and beside.max_num_seqs >= num_seqs
