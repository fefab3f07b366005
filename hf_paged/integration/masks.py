"""Patterns of attention masks: which one a mask function of transformers makes, found by trying it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_paged.kernels.bounds import UNBOUNDED, Bounds
from hf_paged.kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """A packed step's mask in place of a tensor: which earlier tokens of its own sequence a token attends to.

    A model receives it from mask creation and passes it to its attention unchanged. A model that computes with its mask
    needs a real tensor and cannot run packed steps. obstacle: why the kernels cannot attend with this mask; a model may
    make one that it does not use.

    In a step in which tokens attend to later ones: reaches: whether this mask lets them. windows: the windows that the
    mask may have (None: no window): a long one hides nothing in short sequences. The call of attention names its own.
    """

    bounds: Bounds = UNBOUNDED
    obstacle: str | None = None
    windows: tuple[int | None, ...] = ()
    reaches: bool = True


# Rows of a mask that are compared at a time: a long prompt's whole mask would be a square of its length.
_TILE = 512


def with_reach(mask_function: Callable[..., Any], window: int | None, metadata: AttentionMetadata) -> MaskPattern:
    """Return the pattern of a mask in a step whose tokens attend to later tokens. The mask has to agree with
    `metadata.reach`, or to be causal: layers may differ (Gemma 4)."""
    assert metadata.reach is not None
    device, starts = metadata.reach.device, metadata.query_start_loc.tolist()
    sizes = [None] if window is None else [None, int(window)]
    # All that the mask may be; each tile of each sequence leaves those that fit.
    patterns = [(reaches, size) for reaches in (True, False) for size in sizes]
    for start, stop, length in zip(starts, starts[1:], metadata.seq_lens.tolist()):
        key = torch.arange(start, stop, dtype=torch.int64, device=device)[None]
        ahead = length - stop  # from a row to the position of its token
        for low in range(start, stop, _TILE):
            query = torch.arange(low, min(low + _TILE, stop), dtype=torch.int64, device=device)[:, None]
            actual = mask_function(0, 0, query, key)
            ends = {True: key + ahead <= metadata.reach[query], False: key <= query}
            patterns = [
                (reaches, size)
                for reaches, size in patterns
                if torch.equal(actual, ends[reaches] if size is None else ends[reaches] & (key > query - size))
            ]
    if patterns:
        reaches = patterns[0][0]
        return MaskPattern(windows=tuple(size for each, size in patterns if each == reaches), reaches=reaches)
    return MaskPattern(
        obstacle="its attention mask is neither causal nor a sliding window with runs of tokens that attend to one "
        "another both ways; this model needs the dense view"
    )


def _shape_of(value: Any) -> Any:
    """A key that identifies a mask function: its code and the constants in its closure, recursively."""
    # Models make these functions anew in each forward, so that identity says nothing.
    if callable(value) and hasattr(value, "__code__"):
        return value.__code__, tuple(_shape_of(cell.cell_contents) for cell in value.__closure__ or ())
    if isinstance(value, tuple | list):
        return tuple(map(_shape_of, value))
    return value if isinstance(value, int | str | None) else type(value)


def _looks_ahead(mask_function: Callable[..., Any], device: Any) -> bool:
    """Return True if the mask lets one of the first four tokens attend to a later one."""
    points = torch.arange(4, dtype=torch.int64, device=device)
    try:
        seen = mask_function(0, 0, points[:, None], points[None, :])
    except IndexError:  # it looks positions up in a tensor as long as the batch's rows
        return False
    return isinstance(seen, torch.Tensor) and bool((seen & (points[None, :] > points[:, None])).any())


_patterns: dict[tuple[Any, ...], MaskPattern] = {}


def recognise(mask_function: Callable[..., Any], local_size: int | None, device: Any) -> MaskPattern:
    """Return the pattern of a function whose result depends on positions alone."""
    key = (local_size, _shape_of(mask_function))
    if key not in _patterns:
        _patterns[key] = _recognise(mask_function, local_size, device)
    return _patterns[key]


def _recognise(mask_function: Callable[..., Any], local_size: int | None, device: Any) -> MaskPattern:
    """Compare the function with the patterns that the kernels implement, at the edges of windows and chunks."""
    if local_size is not None:
        size = int(local_size)
        # Windows and chunks differ from one another, and from causal masks, only beside multiples of their size.
        edges = sorted({max(k * size + d, 0) for k in range(4) for d in (-1, 0, 1)})
        points = torch.tensor(edges, dtype=torch.int64, device=device)
        query, key = points[:, None], points[None, :]
        try:
            actual = mask_function(0, 0, query, key)
        except IndexError:  # it looks positions up in a tensor as long as the batch's rows
            actual = None
        causal = key <= query
        for bounds in (Bounds(sliding_window=size), Bounds(chunk_size=size)):
            if actual is not None and torch.equal(actual, causal & ~bounds.hidden(query, key)):
                return MaskPattern(bounds)
    if _looks_ahead(mask_function, device):
        return MaskPattern(
            obstacle="its attention mask lets tokens attend to later ones, as within an image or over an encoder's "
            "states, which a packed row does not support; this model needs the dense view"
        )
    return MaskPattern(
        obstacle="its attention mask is neither causal nor a sliding window nor chunks; this model needs the dense view"
    )
