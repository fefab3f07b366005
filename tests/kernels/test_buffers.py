"""Which code may make tensors, and what no default of torch's and no tensor of other code's can change."""

from __future__ import annotations

import ast
import mmap
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _device

from hf_paged.cache.kv_pool import KVPool
from hf_paged.kernels import buffers
from hf_paged.kernels.native import sampling as native_sampling
from tests.fused.foreign_weights import Sealed, Tagged
from tests.implementations import NATIVE
from tests.kernels.cases import Case, attention_of, make_batch
from tests.sources import FILES, PACKAGE, tree_of

ALIKE = {"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"}
MAKERS = {function.__name__ for function in _device._device_constructors()} | {"scalar_tensor", "empty_strided"}
# torch.from_numpy and torch.frombuffer take the memory of the host, whatever the defaults are.
CLASSES = {"Tensor", "FloatTensor", "LongTensor", "IntTensor", "BoolTensor", "ByteTensor", "DoubleTensor"}
ONLY_BUFFERS = ("kernels/native/", "kernels/triton/", "fused/cpu/")
"""Where addresses are taken: strides must not be those of another tensor."""


def faults(path: str, tree: ast.Module) -> Iterator[str]:
    """The calls that make tensors of a dtype, device or layout which the program's defaults or other tensors decide."""
    if path == "kernels/buffers.py":
        return
    strict = path.startswith(ONLY_BUFFERS)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and {n.name for n in node.names} & MAKERS:
            yield f"{path}:{node.lineno}: import torch, and call torch.{node.names[0].name}"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if of_torch and name in CLASSES:
            yield f"{path}:{node.lineno}: torch.{name} takes the default device"
        elif of_torch and name in MAKERS:
            given = {keyword.arg for keyword in node.keywords}
            # `**` stands for a dictionary of both.
            if not (given >= {"dtype", "device"} or None in given) or (strict and name.startswith("empty")):
                yield f"{path}:{node.lineno}: torch.{name} names {sorted(map(str, given))}"
        elif strict and (name in ALIKE or (of_torch and name.endswith("_like"))):
            yield f"{path}:{node.lineno}: {name} takes the class of another tensor, or its strides; use buffers.empty"


def test_every_tensor_is_made_with_a_dtype_and_a_device() -> None:
    found = [fault for file in FILES for fault in faults(file.relative_to(PACKAGE).as_posix(), tree_of(file))]
    assert found == []


def test_what_the_walk_finds_and_accepts() -> None:
    for call in (
        "torch.empty(3)", "torch.zeros(3, dtype=torch.int64)", "torch.tensor([1], device=device)", "torch.arange(3)",
        "torch.full((3,), 0.0, dtype=dtype)", "torch.Tensor([1])", "torch.randn(3, generator=generator)",
        "rows.new_empty(3)", "torch.empty_like(rows)", "torch.empty(3, dtype=dtype, device=device)",
    ):  # fmt: skip
        assert len(list(faults("kernels/native/ops.py", ast.parse(call)))) == 1
        assert list(faults("kernels/buffers.py", ast.parse(call))) == []
    for call in ("torch.zeros(3, dtype=dtype, device=device)", "torch.from_numpy(x)", "x.new_zeros(3)", "np.empty(3)"):
        assert list(faults("generation/decoder.py", ast.parse(call))) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_no_default_changes_a_buffer(dtype: torch.dtype) -> None:
    own = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            made = buffers.empty((2, 3), torch.float32)
    finally:
        torch.set_default_dtype(own)
    assert made.dtype == torch.float32 and made.is_cpu and made.is_contiguous() and buffers.has_memory(made)


def test_tensors_without_memory() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="FakeTensor"):
        buffers.empty((2,), torch.float32)
    assert not buffers.has_memory(torch.empty(2, dtype=torch.float32, device="meta"))
    assert not buffers.has_memory(torch.eye(2).to_sparse())


BAD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp64": torch.Tensor.double, "meta": lambda x: x.to("meta"), "strided": lambda x: x.t().contiguous().t(),
    "wrapped": Sealed, "one row": lambda x: x[0],
}  # fmt: skip


@NATIVE
@pytest.mark.parametrize("kind", BAD)
def test_scores_that_the_kernels_cannot_read(kind: str) -> None:
    scores, generators = BAD[kind](torch.ones(2, 64)), [torch.Generator()] * 2
    for call in (
        lambda: native_sampling.greedy(scores),
        lambda: native_sampling.draw(scores, generators),
        lambda: native_sampling.draw_top_p(scores, [0.5, 0.5], generators),
        lambda: native_sampling.keep_largest(scores, [3, 3]),
    ):
        with pytest.raises(ValueError, match=r"needed|no memory"):
            call()


@NATIVE
def test_one_number_for_each_row() -> None:
    scores = torch.ones(2, 64)
    for call in (
        lambda: native_sampling.draw(scores, [torch.Generator()]),
        lambda: native_sampling.draw_top_p(scores, [0.5], [torch.Generator()] * 2),
        lambda: native_sampling.keep_largest(scores, [3]),
        lambda: native_sampling.keep_largest(scores, [3, 65]),
    ):
        with pytest.raises(ValueError, match=r"for 2 rows|1 to 64"):
            call()


def attend(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The attention of two decode steps, their K and V written first; one of the tensors is changed."""
    batch = make_batch(Case(((1, 9), (1, 20))))
    tensors = {"query": batch.query, "key_cache": batch.key_cache, "value_cache": batch.value_cache}
    tensors |= {"key": torch.ones(2, 2, 32), "value": torch.ones(2, 2, 32)}
    metadata = replace(batch.metadata, in_bounds=True, scratch={})
    if name in tensors:
        tensors[name] = change(tensors[name])
    else:
        metadata = replace(metadata, **{name: change(getattr(metadata, name))})
    result = attention_of(**tensors, metadata=metadata, scale=0.2, impl="native")
    assert isinstance(result, torch.Tensor)
    return result


@NATIVE
def test_attention_over_other_classes() -> None:
    """Tensors with memory of their own are read there, whatever their class; wrappers are refused."""
    for name in (
        "query", "key_cache", "value_cache", "key", "value", "block_tables", "seq_lens", "query_start_loc",
        "slot_mapping",
    ):  # fmt: skip
        assert attend(name, lambda x: x.as_subclass(Tagged)).equal(attend(name, lambda x: x))
        with pytest.raises(ValueError, match="a Sealed has no memory"):
            attend(name, Sealed)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, memory is not given back")
def test_pages_of_rows_are_given_back_to_the_system() -> None:
    """Those that lie within the rows: their neighbours keep their contents."""
    rows = torch.ones(64, 5000, dtype=torch.float32)  # 20,000 bytes: rows begin within pages
    given = [3, 4, 5, 9, 40]
    buffers.give_back(rows, given)
    kept = [row for row in range(64) if row not in given]
    assert bool((rows[kept] == 1).all())
    zeros = (rows[given] == 0).sum(dim=1)
    assert int(zeros[1]) == 5000 and int(zeros.min()) >= 5000 - 2 * mmap.PAGESIZE // 4
    rows[given] = 2
    assert bool((rows[given] == 2).all())


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this system has no large pages")
def test_kv_memory_asks_for_large_pages() -> None:
    pool = KVPool(num_blocks=1024, block_size=16)
    row = torch.zeros(1, 8, 64)
    key = pool.layer_for(0, row, row).key
    assert "hg" in _flags_at(key.data_ptr() + key.nbytes // 2)


def _flags_at(address: int) -> list[str]:
    """The flags of the mapping at this address (proc(5), smaps)."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:
            first, end = (int(each, 16) for each in name.split("-"))
            is_here = first <= address < end
        elif is_here and name == "VmFlags:":
            return values
    raise AssertionError(f"nothing is mapped at {address:#x}")
