"""Memory that native code and devices read and write. Buffers are made here, and tensors of other code are checked
before their address is taken.

torch's own functions take what a call does not name from defaults that any program may change (`set_default_dtype`,
`set_default_device`, `with torch.device(...)`), and strides and class from a tensor that they imitate.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

# Bytes of a large page of Linux on x86-64.
_LARGE_PAGE = 1 << 21

HOST = torch.device("cpu")


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST, *, pinned: bool = False
) -> torch.Tensor:
    """A contiguous tensor with any values. pinned: in memory of the host that a GPU can read.

    Raises RuntimeError if a mode of other code makes a tensor without memory, such as a FakeTensor.
    """
    made = torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
    if made.is_cpu and type(made) is not torch.Tensor:
        raise RuntimeError(f"torch makes a {type(made).__name__} here, which has no memory for the kernels")
    return made


def in_large_pages(num_bytes: int) -> torch.Tensor:
    """Memory, uint8 [num_bytes], aligned to large pages, for which Linux is asked: streaming it needs fewer address
    translations."""
    # torch aligns to 64 bytes only, so one page more leaves room to move the start.
    memory = empty((num_bytes + _LARGE_PAGE,), torch.uint8)
    memory = memory[-memory.data_ptr() % _LARGE_PAGE :][:num_bytes]
    ask_for_large_pages(memory)
    return memory


def ask_for_large_pages(memory: torch.Tensor) -> None:
    """Ask Linux for large pages where this contiguous memory, which has not been used, holds whole ones."""
    if sys.platform == "linux" and memory.nbytes >= _LARGE_PAGE:
        # `madvise` refuses another start, and rounds the length up: into memory of others.
        start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (memory.data_ptr() + memory.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def trim() -> None:
    """Give memory that has been freed back to the system. (glibc keeps what it has not mapped by itself.)"""
    # Other C libraries than glibc, such as musl, lack the function.
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))


def mapped_files() -> list[range]:
    """The addresses at which this process alone has mapped files, not in memory that processes share; none where the
    system does not tell."""
    maps = Path("/proc/self/maps")
    lines = [line.split(maxsplit=5) for line in maps.read_text().splitlines()] if maps.exists() else []
    bounds = [fields[0].split("-") for fields in lines if fields[1].endswith("p") and fields[4] != "0"]
    return [range(int(first, 16), int(last, 16)) for first, last in bounds]


def give_back(rows: torch.Tensor, places: Iterable[int]) -> None:
    """Give the pages of memory that lie within these rows of a contiguous tensor back to the system. Their elements are
    undefined until they are written."""
    if sys.platform != "linux":
        return
    madvise, size = ctypes.CDLL(None).madvise, rows[0].nbytes
    begin = end = 0  # of neighbours
    for place in (*sorted(places), None):
        first = -1 if place is None else rows.data_ptr() + place * size
        if first == end:
            end += size
            continue
        # Whole pages only: the rest of the first and the last one belongs to neighbouring rows.
        start, stop = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
        begin, end = first, first + size


def has_memory(tensor: torch.Tensor) -> bool:
    """Return True if the elements lie at the tensor's address, and its class computes as torch's own does."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.data_ptr() != 0


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements without the class that other code has given a tensor.

    Raises ValueError if they are not in memory at the tensor's address: it is on no device, or wraps other tensors.
    """
    owner = type(tensor)
    if owner in (torch.Tensor, nn.Parameter):
        return tensor
    if owner.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ValueError(f"a {owner.__name__} has no memory that the kernels can read")
    # Otherwise the class's own `__torch_function__` would answer the call.
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)
