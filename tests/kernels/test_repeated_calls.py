"""The attention of a decode step is prepared by its first layer and repeated by layers with tensors of that layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_paged.cache.memory import PagedMemory
from hf_paged.kernels.metadata import AttentionMetadata, DecodeArrays
from hf_paged.kernels.native import ops as native_ops
from hf_paged.model.packed import decode_step
from tests.implementations import NATIVE, compute_by
from tests.kernels.cases import attention_of
from tests.noted import note_calls

LENS = (1, 16, 17, 40)
BLOCK_SIZE, BLOCKS = 16, 9

pytestmark = NATIVE


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each call that was prepared from scratch. The default implementation is the native one."""
    compute_by(monkeypatch, "native")
    return note_calls(monkeypatch, native_ops, "attention_call", lambda *_, **__: 1)


def step() -> AttentionMetadata:
    tables = torch.tensor([[0, 0, 0], [1, 0, 0], [2, 3, 0], [4, 5, 6]], dtype=torch.int32)
    last = torch.tensor(LENS) - 1
    slots = tables.long()[torch.arange(4), last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
    lens, starts = torch.tensor(LENS, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    return AttentionMetadata(tables, lens, starts, slots, max_query_len=1, max_seq_len=max(LENS))


def test_a_step_becomes_the_next_one(prepared: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a step with other blocks, or with more chunks of keys, is prepared again; others are changed in place."""
    memory = PagedMemory(BLOCK_SIZE, 64)
    for seq_id, length in enumerate((1, 30, 120)):
        memory.append([(seq_id, length)])
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randn(64, BLOCK_SIZE, 2, 32, generator=generator) for _ in range(2)]
    arrays, followed = DecodeArrays(BLOCK_SIZE), note_calls(monkeypatch, DecodeArrays, "_followed", lambda *_: 1)
    for index in range(40):
        if index == 20:
            memory.fork(2, 3)  # its block is copied when it grows
        seq_ids = [0, 1, 2] if index < 20 else [0, 1, 3]
        memory.append([(seq_id, 1) for seq_id in seq_ids])
        starts = [memory.manager.num_tokens(seq_id) - 1 for seq_id in seq_ids]
        step = decode_step(arrays, memory, seq_ids, starts)
        records = arrays.metadata(step, torch.device("cpu"))
        fresh, positions = memory.step_metadata(seq_ids, [1] * 3, torch.device("cpu"))
        for name in ("block_tables", "seq_lens", "query_start_loc", "slot_mapping", "max_seq_len", "max_query_len"):
            ours, theirs = (getattr(metadata, name) for metadata in (records[0], fresh[0]))
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)), name
        assert step.positions.tolist() == positions.tolist()
        for _ in range(2):  # layers
            query, key, value = (torch.randn(3, heads, 32, generator=generator) for heads in (4, 2, 2))
            copies = [cache.clone() for cache in caches]
            got = attention_of(query, *caches, records[0], scale=0.2, key=key, value=value)
            expected = attention_of(
                query, *copies, replace(fresh[0], scratch={}), scale=0.2, key=key, value=value, impl="native"
            )
            assert torch.equal(got, expected)
            assert all(map(torch.equal, caches, copies))
    made = 40 - len(followed)
    assert made == 9 and len(prepared) == made + 80  # one for each call of the comparison


def layer(seed: int, *, heads: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "query": randn(4, heads, 32), "key_cache": randn(BLOCKS, BLOCK_SIZE, 2, 32),
        "value_cache": randn(BLOCKS, BLOCK_SIZE, 2, 32), "key": randn(4, 2, 32), "value": randn(4, 2, 32),
    }  # fmt: skip


def attend(tensors: dict[str, torch.Tensor], metadata: AttentionMetadata, **options: Any) -> Any:
    return attention_of(**{**tensors, "metadata": metadata, "scale": 0.2, **options})


def check(tensors: dict[str, torch.Tensor], metadata: AttentionMetadata, **options: Any) -> None:
    """The result and the caches are those of a call on its own, and the reference's."""
    alone, reference = ({name: x.clone() for name, x in tensors.items()} for _ in range(2))
    expected = attend(alone, replace(metadata, scratch={}), **options)
    close = attend(reference, replace(metadata, scratch={}), impl="reference", **options)
    actual = attend(tensors, metadata, **options)
    assert torch.equal(actual, expected)
    torch.testing.assert_close(actual, close, atol=2e-2, rtol=2e-2)
    for name in ("key_cache", "value_cache"):
        assert torch.equal(tensors[name], alone[name])


def test_layers_of_one_layout_are_prepared_once(prepared: list[int]) -> None:
    metadata = step()
    layers = [layer(seed) for seed in range(4)]
    results = [attend(tensors, metadata) for tensors in layers]
    assert len(prepared) == 1
    for tensors, result in zip(layers, results):
        assert torch.equal(result, attend(tensors, replace(metadata, scratch={}), key=None, value=None))
    assert not torch.equal(results[0], results[1])
    for seed in range(4, 6):
        check(layer(seed), metadata)


@pytest.mark.parametrize("changed", [
    {"scale": 0.3}, {"sliding_window": 8}, {"chunk_size": 16}, {"softcap": 5.0},
    {"sinks": torch.tensor([0.1, 0.2, 0.3, 0.4])}, {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_layers_with_other_options(changed: dict[str, Any], prepared: list[int]) -> None:
    metadata = step()
    for seed, options in enumerate(({}, changed, {}, changed)):
        check(layer(seed), metadata, **options)


def test_tensors_of_other_layouts(prepared: list[int]) -> None:
    metadata = step()
    usual, wide, half = layer(0), layer(1, heads=8), layer(2, dtype=torch.bfloat16)
    strided = layer(3)
    strided["query"] = strided["query"].transpose(0, 1).contiguous().transpose(0, 1)
    strided["key"] = torch.stack([strided["key"], strided["key"]], dim=-1)[..., 0]
    mixed = layer(4)
    mixed["value"] = mixed["value"].bfloat16()
    for tensors in (usual, wide, half, strided, mixed, layer(5), strided, mixed, layer(6)):
        check(tensors, metadata)


def test_a_given_out_and_lse(prepared: list[int]) -> None:
    metadata = step()
    attend(layer(0), metadata)
    tensors, out = layer(1), torch.empty(4, 4, 32)
    assert attend(tensors, metadata, out=out) is out
    again, lse = attend(tensors, metadata, return_lse=True)
    assert torch.equal(again, out) and lse.shape == (4, 4)


def test_a_wrong_shape_is_still_refused(prepared: list[int]) -> None:
    metadata = step()
    attend(layer(0), metadata)
    tensors = layer(1)
    tensors["key"] = tensors["key"][:3]
    with pytest.raises(ValueError, match=r"key .* do not fit caches|slot_mapping has|key"):
        attend(tensors, metadata)
