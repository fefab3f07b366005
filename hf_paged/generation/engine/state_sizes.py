"""Memory of recurrent states in an engine, and of their checkpoints."""

from __future__ import annotations

import logging
from dataclasses import replace

from hf_paged.cache.checkpoints import UNPINNED, CheckpointRules
from hf_paged.config import CacheConfig, SchedulerConfig
from hf_paged.generation.engine.room import RETAINED_FRACTION, DeviceBytes, blocks_in_memory, is_default_size, room_on
from hf_paged.sockets import Executor

CHECKPOINTS = 1
"""Checkpoints for each sequence of a step that there is always room for, with prefix caching, beside UNPINNED."""

log = logging.getLogger("hf_paged")


class StateSizes:
    """Sizes of what an executor keeps of sequences beside K/V, which may be nothing.

    blocks: the memory of a sequence's state in blocks, if what is free of one can be used for the other; 0: it cannot,
    or there are no states. max_num_seqs: sequences of a step, at most. rules: what may be kept of states, if anything.
    """

    def __init__(self, executor: Executor, cache: CacheConfig, scheduler: SchedulerConfig) -> None:
        self._executor, self._pool, self._has_kv = executor, executor.memory.pool, bool(executor.memory.groups)
        self._cache, self._scheduler = cache, scheduler
        self.blocks = self._in_blocks()
        self.max_num_seqs = self._most_seqs()
        self.rules: CheckpointRules | None = None

    def _in_blocks(self) -> float:
        """Both must be on the CPU, where memory that is not used takes no room; a number of blocks says nothing about
        states."""
        executor = self._executor
        if not executor.has_states or not self._has_kv or self._cache.num_blocks is not None:
            return 0.0
        blocks = self.block_sizes
        if any(device.type != "cpu" for device in (*blocks, *executor.state_bytes)):
            return 0.0
        size = sum(executor.state_bytes.values())
        if self._cache.memory_bytes is None:  # a size that is given is for what stays
            size += sum(executor.tensor_bytes.values())  # while a step joins rows, one tensor of each is there twice
        return size / sum(blocks.values())

    @property
    def block_sizes(self) -> DeviceBytes:
        """Bytes of a block on each device, with those of states that have grown by the block's tokens."""
        sizes, block_size = self._pool.bytes_per_block_by_device, self._executor.memory.block_size
        own = {device: size * block_size for device, size in self._executor.state_bytes_per_token.items()}
        return {device: sizes.get(device, 0) + own.get(device, 0) for device in {**sizes, **own}}

    @property
    def taken(self) -> DeviceBytes:
        """Bytes on each device that are kept from blocks."""
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
        """With K/V besides, their states take half of the memory, unless they are in the same one. (A number of blocks
        says nothing about states.)"""
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
        """States may be kept for prefixes. The blocks have been given to the memory."""
        if not self._executor.has_states:
            return
        # As blocks, states that nothing needs now take memory that was not given only for them.
        spare = 0 if is_default_size(self._cache) or self._cache.num_blocks is not None else 1
        in_pieces, count = self._executor.splits_prompts, self._num_checkpoints()
        self.rules = CheckpointRules(count, spare, self.max_num_seqs, in_pieces, self.blocks)

    def _num_checkpoints(self) -> int:
        """Checkpoints that there is always room for. A number of blocks says nothing about them: they are then as many
        as fit, beside the blocks and the states of all sequences, into the default share of the free memory.

        With `blocks`, there are as many at most. They share the memory of cached blocks then."""
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
