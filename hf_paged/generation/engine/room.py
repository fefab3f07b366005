"""Memory for the K/V of an engine or a call: how much there is, how many blocks it holds, and how layers share them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_paged.cache.host_memory import host_memory
from hf_paged.cache.layers import FULL, Kind, LayerSize, Layout, layout_of
from hf_paged.config import CacheConfig
from hf_paged.kernels.quantised import storage_of
from hf_paged.model.report import LayerSupport, SupportReport

DEFAULT_FRACTION = {"cuda": 0.9, "cpu": 0.3}
"""Share of the free memory for K/V when the caller gives no size. Host memory is shared with other programs; pages
that no sequence has used cost nothing there."""

RETAINED_FRACTION = 1 / 8
"""Share of a pool of the default size that cached prefixes may fill on a CPU. Beyond it they are evicted before a block
is touched for the first time, so that a server takes little more memory than its running requests need. In a pool whose
size the caller gave, cached prefixes may fill all of it."""

DeviceBytes = Mapping[torch.device, int]


def blocks_in_memory(
    cache_config: CacheConfig,
    sizes: DeviceBytes,
    *,
    idle: DeviceBytes | None = None,
    taken: DeviceBytes | None = None,
    what: str = "block",
) -> int:
    """Return how many blocks fit: into `memory`, which is for all devices together, or into `memory_fraction` or the
    default share of the free memory of each device.

    sizes: bytes of one block on each device. idle: bytes of a pool that will be reused, which count as free. taken:
    bytes that something else gets. what: the word for a block in messages. Raises ValueError if not even one fits.
    """
    idle, taken = idle or {}, taken or {}
    if cache_config.memory_bytes is not None:
        # A size in bytes counts all devices together; how layers are distributed is not the caller's concern.
        free = cache_config.memory_bytes - sum(taken.values())
        room = [(free, sum(sizes.values()), f"memory={cache_config.memory!r}")]
    else:
        room = [
            room_on(device, size, cache_config, idle.get(device, 0), taken.get(device, 0))
            for device, size in sizes.items()
        ]
    # Each block has a part on every device, so the fullest device decides.
    num_bytes, size, source = min(room, key=lambda each: each[0] // each[1])
    if num_bytes < size:
        raise ValueError(f"{source} holds no {what}: one takes {size} bytes; give the cache more memory")
    return num_bytes // size


def room_on(device: torch.device, size: int, cache_config: CacheConfig, idle: int, taken: int) -> tuple[int, int, str]:
    """Return the bytes for K/V on a device, the bytes of one block there, and the source of the former in words."""
    fraction = cache_config.memory_fraction
    free = _free_bytes(device) + idle
    share = DEFAULT_FRACTION.get(device.type, 0.3) if fraction is None else fraction
    return int(free * share) - taken, size, f"{share:g} of {free} free bytes on {device}"


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        # Else memory that torch's allocator keeps for reuse would count as taken.
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return host_memory().available


def is_default_size(cache_config: CacheConfig) -> bool:
    return cache_config.num_blocks is None and cache_config.memory is None and cache_config.memory_fraction is None


def layout_for(report: SupportReport, config: CacheConfig, max_length: int | None = None) -> Layout:
    """Return the groups in which the layers of a native model share blocks. A window or chunk of at least `max_length`
    tokens counts as full attention.

    Sizes are in elements, or in bytes for K or V in eight bits.
    """
    layers: list[tuple[int, Kind, LayerSize]] = []
    for layer in report.layers:
        if layer.num_kv_heads is None:
            continue  # it reads another layer's K/V, or keeps none
        kind = layer.kind
        if max_length is not None and (kind.bounds.most or 0) >= max_length:
            kind = FULL
        layers.append((layer.index, kind, _layer_size(layer, config)))
    return layout_of(tuple(layers), config.block_size)


def _layer_size(layer: LayerSupport, config: CacheConfig) -> LayerSize:
    heads, dims = layer.num_kv_heads or 0, (layer.head_dim or 0, layer.v_head_dim or 0)
    key, value = (heads * dim for dim in dims)
    storage = storage_of(config.key_dtype, config.value_dtype)
    if not storage.is_exact and key + value:
        key, value = storage.bytes_per_token(heads, dims, layer.bytes_per_token // (key + value))
    return LayerSize(key, value, layer.device)


def token_sizes(report: SupportReport, config: CacheConfig, itemsize: int) -> DeviceBytes:
    """Bytes on each device of a token's K/V in all layers. itemsize: of an element that is not in eight bits."""
    unit = itemsize if config.key_dtype is None and config.value_dtype is None else 1
    sizes: dict[torch.device, int] = {}
    for layer in report.layers:
        if layer.device is not None:
            sizes[layer.device] = sizes.get(layer.device, 0) + _layer_size(layer, config).total * unit
    return sizes
