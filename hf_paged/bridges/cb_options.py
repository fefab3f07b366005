"""transformers' ContinuousBatchingConfig as options of our engine.

Decisions are data: a field that is in none of the tables, because a newer transformers has brought it, is refused
if it is set.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any

from transformers import ContinuousBatchingConfig

from hf_paged.annotations import Model
from hf_paged.config import CacheConfig, SchedulerConfig
from hf_paged.generation.engine.engine import Engine

log = logging.getLogger("hf_paged")

_HONOURED = frozenset(
    {
        "page_size",
        "block_size",
        "num_blocks",
        "max_batch_tokens",
        "max_memory_percent",
        "max_requests_per_batch",
        "allow_block_sharing",
        "use_async_batching",
        "use_cuda_graph",
        "cpu_offload_space",
        "return_logprobs",
        "seed",
        "max_queue_size",
        "per_request_processors",  # every request may have its own options
        "drop_unsupported_processors",  # none is unsupported
    }
)
# They tune transformers' own kernels, graphs, compilation and processes, and change no result.
_WITHOUT_EFFECT = frozenset(
    {
        "max_blocks_per_request",
        "q_padding_interval_size",
        "kv_padding_interval_size",
        "varlen_compile_config",
        "decode_compile_config",
        "default_compile_level",
        "use_default_compile_configs",
        "max_cached_graphs",
        "safety_margin",
        "auto_switch_to_flash",
        "cpu_offload_space_safety_threshold",
        "disable_nccl_graph_mixing",
        "cpu_group_timeout",
    }
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Arguments of `hf_paged.Engine`."""

    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    cuda_graphs: bool | None = None

    def open(self, model: Model) -> Engine:
        return Engine(model, self.cache_config, self.scheduler_config, cuda_graphs=self.cuda_graphs)


def engine_options(config: Any) -> EngineOptions:
    """config: a ContinuousBatchingConfig or None. Raises ValueError for what the engine does not do.

    A page size that is transformers' default stands for the engine's own block size; a number of blocks then keeps the
    number of tokens.
    """
    if config is None:
        return EngineOptions(CacheConfig(), SchedulerConfig())
    standard = ContinuousBatchingConfig()
    set_names = {field.name for field in fields(config) if getattr(config, field.name) != getattr(standard, field.name)}
    _check(set_names, config)
    page = "page_size" if hasattr(config, "page_size") else "block_size"  # renamed in transformers 5.18
    size = getattr(config, page)
    block_size = size if page in set_names else CacheConfig.__dataclass_fields__["block_size"].default
    cache: dict[str, Any] = {"block_size": block_size}
    if config.num_blocks is not None:
        # As many tokens, in blocks of another size.
        cache["num_blocks"] = max(1, config.num_blocks * size // block_size)
    elif config.max_memory_percent is not None:
        cache["memory_fraction"] = config.max_memory_percent
    if config.cpu_offload_space:
        cache["swap_memory"] = int(config.cpu_offload_space * 2**30)
    # The default of `allow_block_sharing` is True, also for models whose prefixes cannot be shared.
    scheduler: dict[str, Any] = {"prefix_caching": None if config.allow_block_sharing else False}
    for name, theirs in (("max_num_seqs", "max_requests_per_batch"), ("max_num_batched_tokens", "max_batch_tokens")):
        if getattr(config, theirs) is not None:
            scheduler[name] = getattr(config, theirs)
    if config.use_async_batching is not None:
        scheduler["async_scheduling"] = config.use_async_batching
    graphs = config.use_cuda_graph
    return EngineOptions(
        CacheConfig(**cache), SchedulerConfig(**scheduler), any(graphs) if isinstance(graphs, (tuple, list)) else graphs
    )


def _check(set_names: set[str], config: Any) -> None:
    if "scheduler_type" in set_names:
        raise ValueError(
            f"continuous_batching_config.scheduler_type={config.scheduler_type!r}: hf_paged has its own scheduler; "
            "leave it out"
        )
    unknown = sorted(set_names - _HONOURED - _WITHOUT_EFFECT)
    if unknown:
        raise ValueError(
            f"continuous_batching_config.{unknown[0]}={getattr(config, unknown[0])!r} is not known to this version of "
            "hf_paged; leave it out, or undo hf_paged.install_serving() with hf_paged.uninstall_serving()"
        )
    if idle := sorted(set_names & _WITHOUT_EFFECT):
        log.warning("hf_paged runs continuous batching; without effect there: %s", ", ".join(idle))


def longest_request(engine: Engine, config: Any) -> int:
    """Tokens of the longest sequence that the engine allows a request with this generation config."""
    return engine.longest_request(config.num_beams or engine.model.generation_config.num_beams or 1)
