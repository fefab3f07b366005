"""PagedAttention as a plugin backend for transformers.

After `import hf_paged`, `model.generate(..., cache_implementation="paged")` works. torch and transformers are imported
only when they are used.

    install, uninstall             put the plugin into transformers; take it out
    install_serving                transformers' continuous batching and `transformers serve` on our engine
    check                          what a model gets, layer by layer, and why
    record_calls                   which route calls of `generate` took, and what memory they used
    PagedKVCache                   the cache alone, wherever transformers takes a cache
    prepack, release_memory        packed weights for calls of `generate`; free what is kept for later calls
    tokenwise                      mark a hook as one that treats each token on its own
    weights_changed                say that weights changed where it may not be noticed
    Engine                         continuous batching: requests arrive and end at any step
    Drafter                        what may draft the next tokens for an engine (speculative decoding)
    first_layers                   a model's own first layers, which may draft for it
    grammar                        a logits processor that keeps answers within a schema, a regex or a grammar
    CacheConfig, SchedulerConfig   how much memory; how requests are scheduled
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_paged import threads as _threads  # noqa: F401  # its exit function runs after those of the program
from hf_paged.config import CacheConfig, SchedulerConfig
from hf_paged.errors import (
    EngineError,
    OutOfBlocks,
    QueueFull,
    RankError,
    UnsupportedModelError,
    UnsupportedVersionError,
)
from hf_paged.plugin import install, install_serving, uninstall, uninstall_serving

if TYPE_CHECKING:
    from hf_paged.cache.paged_cache import PagedKVCache
    from hf_paged.features.grammar.grammar import grammar
    from hf_paged.features.speculation.drafts import Drafter
    from hf_paged.features.speculation.first_layers import first_layers
    from hf_paged.features.watch.foreign import tokenwise
    from hf_paged.fused.cpu.weights import prepack
    from hf_paged.fused.report import check
    from hf_paged.generation.engine.engine import Engine
    from hf_paged.generation.engine.stats import EngineStats
    from hf_paged.generation.paged_generate import release_memory
    from hf_paged.generation.records import CallRecord, record_calls
    from hf_paged.generation.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from hf_paged.model.state import weights_changed
    from hf_paged.model.support import SupportReport

__version__ = "0.1.0"

_LAZY = {
    "CallRecord": "hf_paged.generation.records",
    "CompletionOutput": "hf_paged.generation.requests.outputs",
    "Drafter": "hf_paged.features.speculation.drafts",
    "Engine": "hf_paged.generation.engine.engine",
    "EngineStats": "hf_paged.generation.engine.stats",
    "PagedKVCache": "hf_paged.cache.paged_cache",
    "RequestMetrics": "hf_paged.generation.requests.outputs",
    "RequestOutput": "hf_paged.generation.requests.outputs",
    "SupportReport": "hf_paged.model.support",
    "check": "hf_paged.fused.report",
    "first_layers": "hf_paged.features.speculation.first_layers",
    "grammar": "hf_paged.features.grammar.grammar",
    "prepack": "hf_paged.fused.cpu.weights",
    "record_calls": "hf_paged.generation.records",
    "release_memory": "hf_paged.generation.paged_generate",
    "tokenwise": "hf_paged.features.watch.foreign",
    "weights_changed": "hf_paged.model.state",
}

__all__ = [
    "CacheConfig",
    "CallRecord",
    "CompletionOutput",
    "Drafter",
    "Engine",
    "EngineError",
    "EngineStats",
    "OutOfBlocks",
    "PagedKVCache",
    "QueueFull",
    "RankError",
    "RequestMetrics",
    "RequestOutput",
    "SchedulerConfig",
    "SupportReport",
    "UnsupportedModelError",
    "UnsupportedVersionError",
    "check",
    "first_layers",
    "grammar",
    "install",
    "install_serving",
    "prepack",
    "record_calls",
    "release_memory",
    "tokenwise",
    "uninstall",
    "uninstall_serving",
    "weights_changed",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    except (ImportError, AttributeError) as error:  # a name that another transformers does not have
        from hf_paged.versions import blamed

        raise blamed(error) from error
    # Kept, so that the next look finds it without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


install()
