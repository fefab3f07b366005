"""PagedAttention as a plugin backend for transformers.

Importing this package is all it takes: `model.generate(..., cache_implementation="paged")` then works. Nothing heavy
is imported until it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_paged.config import CacheConfig, SchedulerConfig
from hf_paged.errors import EngineError, OutOfBlocks, QueueFull, UnsupportedModelError
from hf_paged.integration.hook import install, uninstall

if TYPE_CHECKING:
    from hf_paged.cache.paged_cache import PagedKVCache
    from hf_paged.fused.cpu.weights import prepack
    from hf_paged.generation.engine.engine import Engine
    from hf_paged.generation.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from hf_paged.generation.engine.stats import EngineStats
    from hf_paged.generation.paged_generate import release_memory
    from hf_paged.generation.records import CallRecord, record_calls
    from hf_paged.model.state import weights_changed
    from hf_paged.model.support import SupportReport, check

__version__ = "0.1.0"

_LAZY = {
    "CallRecord": "hf_paged.generation.records",
    "CompletionOutput": "hf_paged.generation.engine.outputs",
    "Engine": "hf_paged.generation.engine.engine",
    "EngineStats": "hf_paged.generation.engine.stats",
    "PagedKVCache": "hf_paged.cache.paged_cache",
    "RequestMetrics": "hf_paged.generation.engine.outputs",
    "RequestOutput": "hf_paged.generation.engine.outputs",
    "SupportReport": "hf_paged.model.support",
    "check": "hf_paged.model.support",
    "prepack": "hf_paged.fused.cpu.weights",
    "record_calls": "hf_paged.generation.records",
    "release_memory": "hf_paged.generation.paged_generate",
    "weights_changed": "hf_paged.model.state",
}

__all__ = [
    "CacheConfig",
    "CallRecord",
    "CompletionOutput",
    "Engine",
    "EngineError",
    "EngineStats",
    "OutOfBlocks",
    "PagedKVCache",
    "QueueFull",
    "RequestMetrics",
    "RequestOutput",
    "SchedulerConfig",
    "SupportReport",
    "UnsupportedModelError",
    "check",
    "install",
    "prepack",
    "record_calls",
    "release_memory",
    "uninstall",
    "weights_changed",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


install()
