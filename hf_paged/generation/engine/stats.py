"""EngineStats: the figures of an engine at one moment, and how they are collected."""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged.generation.engine.runner import Runner
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.stepper import Stepper


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment. free + used + cached == num_blocks.

    used: referenced by a sequence; shared: by more than one; cached: kept by the prefix cache only, or K/V of an
    encoder's states that no running request reads; both with the memory of states and their checkpoints, where it is
    the same, in blocks; swapped: host blocks that hold preempted sequences. kv_bytes_reserved: size of the pool;
    kv_bytes_touched: of the blocks that have ever been handed out (on a CPU the system gives memory for no more than
    these). kv_waste_ratio: share of the used blocks' slots that hold no token (what Figure 2 of the paper measures).
    kv_bytes_saved_by_sharing: bytes that the same sequences would take in addition without sharing. blocks_swapped_out,
    blocks_swapped_in: copied to and from host memory. prefix_cache_evictions: cached blocks whose memory was needed.
    num_drafts, drafted_tokens: guesses of next tokens that steps have verified, and tokens in them; accepted_tokens:
    those of them that were right, accepted_by_position: by their position in a draft.
    graph_replays: those of the steps that a CUDA graph computed. encoder_inputs: inputs that the encoder of an
    encoder-decoder model, or the encoders of images, videos and sound have computed; encoder_hits: inputs that had been
    computed for another request. Counters count since the
    start.
    """

    num_blocks: int
    blocks_free: int
    blocks_used: int
    blocks_shared: int
    blocks_cached: int
    blocks_swapped: int
    num_running: int
    num_waiting: int
    num_swapped: int
    cow_copies: int
    kv_bytes_reserved: int
    kv_bytes_touched: int
    kv_bytes_used: int
    kv_bytes_saved_by_sharing: int
    kv_waste_ratio: float
    preemptions_recompute: int
    preemptions_swap: int
    blocks_swapped_out: int
    blocks_swapped_in: int
    prefix_cache_query_tokens: int
    prefix_cache_hit_tokens: int
    prefix_cache_evictions: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    drafted_tokens: int
    accepted_tokens: int
    graph_replays: int
    encoder_inputs: int = 0
    encoder_hits: int = 0
    num_drafts: int = 0
    accepted_by_position: tuple[int, ...] = ()

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.prefix_cache_hit_tokens / self.prefix_cache_query_tokens if self.prefix_cache_query_tokens else 0.0


def collect_counters(runner: Runner, scheduler: Scheduler, stepper: Stepper, prompt_tokens: int) -> dict[str, int]:
    """The counters that EngineStats and an EngineSnapshot have in common, by their names there."""
    cache = scheduler.prefix_cache
    return {
        "cow_copies": scheduler.manager.num_copies,
        "preemptions_recompute": scheduler.num_preemptions_recompute,
        "preemptions_swap": scheduler.num_preemptions_swap,
        "blocks_swapped_out": runner.blocks_swapped_out,
        "blocks_swapped_in": runner.blocks_swapped_in,
        "prefix_cache_query_tokens": 0 if cache is None else cache.query_tokens,
        "prefix_cache_hit_tokens": 0 if cache is None else cache.hit_tokens,
        "prefix_cache_evictions": 0 if cache is None else cache.num_evictions,
        "prompt_tokens": prompt_tokens,
        "generated_tokens": stepper.generated_tokens,
        "steps": stepper.steps,
        "drafted_tokens": stepper.speculation.drafted_tokens,
        "accepted_tokens": stepper.speculation.accepted_tokens,
    }


def collect_stats(
    runner: Runner,
    scheduler: Scheduler,
    stepper: Stepper,
    *,
    num_arriving: int,
    prompt_tokens: int,
) -> EngineStats:
    """num_arriving: requests that wait for the scheduler. May be called during a step, of which the figures then have a
    part."""
    stats = runner.memory.stats()
    encoders = scheduler.encoders
    kept = 0 if encoders is None else encoders.num_idle_blocks()
    of_states, of_checkpoints = scheduler.num_state_blocks
    bytes_used = stats.bytes_used - kept * runner.memory.pool.bytes_per_block
    allocator, host = scheduler.manager.allocator, scheduler.host_manager
    return EngineStats(
        num_blocks=stats.num_blocks,
        blocks_free=max(allocator.num_free - of_states - of_checkpoints, 0),  # read in a step, they may be of two steps
        blocks_used=stats.blocks_used - kept + of_states,
        blocks_shared=stats.blocks_shared,
        blocks_cached=allocator.num_cached + kept + of_checkpoints,
        blocks_swapped=0 if host is None else host.allocator.num_used + host.allocator.num_withheld,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting + num_arriving,
        num_swapped=scheduler.num_swapped,
        kv_bytes_reserved=stats.bytes_reserved,
        kv_bytes_touched=stats.bytes_touched,
        kv_bytes_used=bytes_used,
        kv_bytes_saved_by_sharing=stats.bytes_saved_by_sharing,
        kv_waste_ratio=1 - stats.bytes_filled / stats.bytes_used if stats.bytes_used else 0.0,
        **collect_counters(runner, scheduler, stepper, prompt_tokens),
        graph_replays=0 if runner.graphs is None else runner.graphs.replays,
        encoder_inputs=runner.num_encoded,
        encoder_hits=runner.num_media_hits if encoders is None else encoders.num_hits,
        num_drafts=stepper.speculation.num_drafts,
        accepted_by_position=tuple(stepper.speculation.accepted_by_position),
    )
