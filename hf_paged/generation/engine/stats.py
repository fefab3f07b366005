"""EngineStats: the figures of an engine at one moment, and how they are collected."""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged.generation.engine.runner import Runner
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.stepper import Stepper


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The figures of an engine at one moment. Between two steps, free + used + cached == num_blocks.

    Counters count since the engine was made. Blocks include the memory of states and their checkpoints, in blocks,
    where it is the same memory.

    Attributes:
        num_blocks: Blocks of the pool.
        blocks_free: Blocks that hold nothing.
        blocks_used: Blocks that a sequence references.
        blocks_shared: Blocks that more than one sequence references (PagedAttention, section 4.4).
        blocks_cached: Blocks that only the prefix cache keeps, and K/V of an encoder's states that no running request
            reads.
        blocks_swapped: Host blocks that hold preempted sequences.
        num_running: Requests that steps compute.
        num_waiting: Requests that wait for their first block, or for a recomputation.
        num_swapped: Requests whose blocks are in host memory.
        cow_copies: Counter of blocks copied on write.
        kv_bytes_reserved: Bytes of the pool.
        kv_bytes_touched: Bytes of all blocks that were ever used. On a CPU the system commits memory for these only.
        kv_bytes_used: Bytes of the blocks of K/V that sequences hold.
        kv_bytes_saved_by_sharing: Bytes that the same sequences would take in addition without sharing.
        kv_waste_ratio: Share of the used blocks' slots that hold no token (what Figure 2 of the paper measures).
        preemptions_recompute: Counter of preemptions that dropped the K/V (section 4.5).
        preemptions_swap: Counter of preemptions that copied it to host memory.
        blocks_swapped_out: Counter of blocks copied to host memory.
        blocks_swapped_in: Counter of blocks copied back.
        prefix_cache_query_tokens: Counter of tokens that requests looked up in the prefix cache when they started, or
            started again.
        prefix_cache_hit_tokens: Counter of these tokens that were in the prefix cache.
        prefix_cache_evictions: Counter of cached blocks whose memory was needed.
        prompt_tokens: Counter of tokens in the prompts of all requests.
        generated_tokens: Counter of tokens that requests were given, those of drafts included.
        steps: Counter of steps that computed something.
        drafted_tokens: Counter of tokens in the drafts that steps have verified.
        accepted_tokens: Counter of drafted tokens that were right.
        graph_replays: Counter of the steps that a CUDA graph computed.
        encoder_inputs: Counter of inputs that the encoder of an encoder-decoder model, or the encoders of images,
            videos and audio, have computed.
        encoder_hits: Counter of inputs that had been computed for another request.
        num_drafts: Counter of drafts, guesses of next tokens that steps have verified.
        accepted_by_position: The right tokens by their position in a draft.

    Example:
        ```python
        from transformers import AutoModelForCausalLM, GenerationConfig
        from hf_paged import Engine

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        with Engine(model, {"num_blocks": 64}) as engine:
            engine.generate([[1, 5, 6]], GenerationConfig(max_new_tokens=4))
            stats = engine.stats()
        print(f"{stats.generated_tokens} tokens in {stats.steps} steps, {stats.blocks_used} blocks in use")
        ```
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
        """Share of the looked-up tokens that the prefix cache had; 0 before the first."""
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
    sides = [side.unlisted_blocks for side in scheduler.side_memories]
    used, cached = sum(used for used, _ in sides), sum(idle for _, idle in sides)
    # Tables that no running request uses are K/V, but they go before a request would wait.
    bytes_used = stats.bytes_used + sum(min(used, 0) for used, _ in sides) * runner.memory.pool.bytes_per_block
    allocator, host = scheduler.manager.allocator, scheduler.host_manager
    return EngineStats(
        num_blocks=stats.num_blocks,
        blocks_free=max(allocator.num_free - used - cached, 0),  # read in a step, they may be of two steps
        blocks_used=stats.blocks_used + used,
        blocks_shared=stats.blocks_shared,
        blocks_cached=allocator.num_cached + cached,
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
        graph_replays=runner.graph_replays,
        encoder_inputs=sum(side.num_computed for side in scheduler.side_memories),
        encoder_hits=sum(side.num_hits for side in scheduler.side_memories),
        num_drafts=stepper.speculation.num_drafts,
        accepted_by_position=tuple(stepper.speculation.accepted_by_position),
    )
