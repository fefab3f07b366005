"""Memory of recurrent states in an engine, and of their checkpoints."""

from __future__ import annotations

import logging
from dataclasses import replace

from hf_paged.config import CacheConfig, SchedulerConfig
from hf_paged.features.rows.checkpoints import UNPINNED, CheckpointRules
from hf_paged.generation.engine.room import RETAINED_FRACTION, DeviceBytes, blocks_in_memory, is_default_size, room_on
from hf_paged.sockets import Executor

CHECKPOINTS = 1
"""Checkpoints for each sequence of a step that there is always room for, with prefix caching, beside UNPINNED."""

log = logging.getLogger("hf_paged")


class StateSizes:
    """Sizes of what an executor keeps of sequences besides K/V. It may keep nothing.

    blocks: the size of a sequence's state in blocks, if states and blocks share memory; 0: they do not, or there are no
    states. max_num_seqs: the most sequences of a step. rules: which checkpoints of states may be kept; None: none.
    """

    def __init__(self, executor: Executor, cache: CacheConfig, scheduler: SchedulerConfig) -> None:
        self._executor, self._pool, self._has_kv = executor, executor.memory.pool, bool(executor.memory.groups)
        self._cache, self._scheduler = cache, scheduler
        self.blocks = self._in_blocks()
        self.max_num_seqs = self._most_seqs()
        self.rules: CheckpointRules | None = None

    def _in_blocks(self) -> float:
        """Return `blocks`. Both must be on the CPU, where unused memory is not committed, and the caller must not have
        given a number of blocks, which says nothing about states."""
        executor = self._executor
        if not executor.has_states or not self._has_kv or self._cache.num_blocks is not None:
            return 0.0
        blocks = self.block_sizes
        if any(device.type != "cpu" for device in (*blocks, *executor.state_bytes)):
            return 0.0
        size = sum(executor.state_bytes.values())
        if self._cache.memory_bytes is None:  # a given size does not include what is used for a moment
            size += sum(executor.tensor_bytes.values())  # while a step joins rows, one tensor of each is there twice
        return size / sum(blocks.values())

    @property
    def block_sizes(self) -> DeviceBytes:
        """Bytes of a block on each device, including the growth of states by the block's tokens."""
        sizes, block_size = self._pool.bytes_per_block_by_device, self._executor.memory.block_size
        own = {device: size * block_size for device, size in self._executor.state_bytes_per_token.items()}
        return {device: sizes.get(device, 0) + own.get(device, 0) for device in {**sizes, **own}}

    @property
    def taken(self) -> DeviceBytes:
        """Bytes on each device that blocks may not use."""
        return {} if self.blocks else self._sizes(self.max_num_seqs)

    @property
    def most_blocks(self) -> int:
        """Blocks whose memory the states of a full batch can use."""
        return int(((1 + CHECKPOINTS) * self._scheduler.max_num_seqs + UNPINNED) * self.blocks)

    def check(self, num_blocks: int, bytes_per_block: int) -> None:
        """Raises ValueError if a memory of so many blocks holds no state of a sequence."""
        if num_blocks <= self.blocks:
            raise ValueError(
                f"the memory of {num_blocks * bytes_per_block} bytes holds no states of a sequence: they take "
                f"{int(self.blocks * bytes_per_block)} bytes, and its K/V takes more; give the cache more memory"
            )

    def limited(self, config: SchedulerConfig) -> SchedulerConfig:
        """`config` with as many sequences as there is memory for."""
        if self.max_num_seqs < config.max_num_seqs:
            log.info("the memory holds the recurrent states of %d sequences at once", self.max_num_seqs)
            config = replace(config, max_num_seqs=self.max_num_seqs)
        return config

    def _most_seqs(self) -> int:
        """Return how many sequences' states fit. If there is K/V besides, and both do not share memory, states get half
        of it. (A number of blocks says nothing about states.)"""
        most = self._scheduler.max_num_seqs
        if self.blocks:
            return most
        fixed, of_one = (self._sizes(count) for count in (0, 1))
        if not any(of_one.values()) or self._cache.num_blocks is not None:
            return most
        shares = 2 if self._has_kv else 1
        sizes = {device: shares * (size - fixed[device]) for device, size in of_one.items()}
        taken = {device: shares * size for device, size in fixed.items()}
        return min(most, blocks_in_memory(self._cache, sizes, taken=taken, what="states of a sequence"))

    def _sizes(self, num_seqs: int) -> DeviceBytes:
        """Bytes of the states of `num_seqs` sequences on each device, and of their checkpoints. While a step joins
        rows, one tensor of each state is in memory twice."""
        executor = self._executor
        keeps = self._scheduler.prefix_caching is not False and not executor.no_prefixes
        checkpoints = (CHECKPOINTS * num_seqs + UNPINNED) * keeps
        return {
            device: (num_seqs + checkpoints) * size + num_seqs * executor.tensor_bytes[device]
            for device, size in executor.state_bytes.items()
        }

    def choose_rules(self) -> None:
        """Choose which states may be kept for prefixes, after the memory has got its blocks."""
        if not self._executor.has_states:
            return
        # Only in memory of a given size do free seats leave room for more checkpoints. A pool of the default size must
        # not grow by what nothing needs now, as with cached blocks.
        spare = 0 if is_default_size(self._cache) or self._cache.num_blocks is not None else 1
        in_pieces, count = self._executor.splits_prompts, self._num_checkpoints()
        self.rules = CheckpointRules(count, spare, self.max_num_seqs, in_pieces, self.blocks)

    def _num_checkpoints(self) -> int:
        """Return how many checkpoints there may be. They always have room, unless they share memory with cached blocks.

        If the caller gave a number of blocks, which says nothing about checkpoints, they get what is left of the
        default share of free memory after the blocks and the states of all sequences."""
        if self.blocks:
            share = RETAINED_FRACTION if is_default_size(self._cache) else 1 / 2
            return max(int(self._pool.num_blocks * share / self.blocks), UNPINNED + 1)
        count = CHECKPOINTS * self.max_num_seqs + UNPINNED
        if self._cache.num_blocks is not None:
            for device, size in self._executor.state_bytes.items():
                taken = self.max_num_seqs * (size + self._executor.tensor_bytes[device])
                if device.type == "cpu":  # pages of the pool are provided when blocks are first written
                    taken += self._pool.num_blocks * self._pool.bytes_per_block_by_device.get(device, 0)
                count = min(count, room_on(device, size, self._cache, 0, taken)[0] // size)
        return max(count, UNPINNED + 1)
