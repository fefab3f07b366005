"""Weights that native kernels read where they are, moved from mapped files into large pages.

A step reads every weight, and a file is mapped in pages of 4 KiB, for each of which a core looks up an address: linear
layers of 1 to 24 rows took 1.1 to 1.3 times as long as from large pages (fp32, AVX2, Zen 4; benchmarks/HISTORY.md).

The parameters stay the same objects, with the same values. What they leave is kept, because another thread may be
computing with its addresses. It takes no memory that Linux could not use for something else: it is in the file, but for
pages that a program has written to.

Knows parameters, not what is computed with them.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable

import torch
from torch import nn

from hf_paged.kernels.buffers import in_large_pages, mapped_files
from hf_paged.locks import usable_after_fork
from hf_paged.model.parameters import uses_of_memory
from hf_paged.model.state import Slot

LEAST_BYTES = 1 << 25
"""Fewer bytes of weights stay where they are: a core knows the addresses of 8 to 12 MB in pages of 4 KiB."""

# Of weights: the length of a line of the caches.
_ALIGNMENT = 64

_left: Slot[list[torch.Tensor]] = Slot("weights in mapped files")
# Of two engines that are made at once, the second one finds that the weights have moved.
_moving = usable_after_fork(threading.Lock())


def move_weights(model: nn.Module, layers: Iterable[nn.Linear], fits: Callable[[int], bool]) -> None:
    """Move those weights of these layers of the model that may be moved, if so many bytes fit."""
    with _moving:
        movable = weights_in_files(layers)
        if movable and fits(sum(weight.nbytes for weight in movable)):
            move_to_large_pages(model, movable)


def weights_in_files(layers: Iterable[nn.Linear]) -> list[torch.Tensor]:
    """The distinct weights of these layers that may be moved: in files that this process has mapped, and in no other
    tensor that a program keeps. None if they have fewer than LEAST_BYTES."""
    weights = list({id(layer.weight): layer.weight for layer in layers}.values())
    if sum(weight.nbytes for weight in weights) < LEAST_BYTES:
        return []
    files = sorted(mapped_files(), key=lambda file: file.start)
    starts = [file.start for file in files]

    def is_in_file(address: int) -> bool:
        place = bisect.bisect(starts, address) - 1
        return place >= 0 and address in files[place]

    movable = [
        weight
        for weight in weights
        if weight.is_contiguous() and is_in_file(weight.data_ptr()) and uses_of_memory(weight) == 1
    ]
    return movable if sum(weight.nbytes for weight in movable) >= LEAST_BYTES else []


def move_to_large_pages(model: nn.Module, weights: list[torch.Tensor]) -> None:
    """Give these weights of the model memory in large pages, in this order."""
    sizes = [-(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT for weight in weights]
    parts = in_large_pages(sum(sizes)).split(sizes)
    left: list[torch.Tensor] = []
    # Made in inference mode, as the caller may be, parameters could not be trained any more.
    with torch.inference_mode(False), torch.no_grad():
        for weight, part in zip(weights, parts, strict=True):
            before = weight.detach()
            after = part[: weight.nbytes].view(weight.dtype).view(weight.shape).copy_(before)
            left.append(before)
            # A storage of its own, as in `fused/gpu/packing.py`, which keeps the memory of all alive.
            weight.data = torch.utils.dlpack.from_dlpack(after)
    _left.put(model, left)
