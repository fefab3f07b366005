"""How a runner packs steps: a step made from the arrays of the last one equals the step made anew."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hf_paged.cache.layers import FULL, WHOLE, Chunk, LayerGroup, Layout, Window
from hf_paged.cache.memory import PagedMemory
from hf_paged.generation.engine.runner import _any_work, _decodes
from hf_paged.generation.requests.sequence import Plan, Sequence, SequenceGroup
from hf_paged.kernels.metadata import AttentionMetadata, DecodeArrays
from hf_paged.model.packed import LateTokens, PackedModel
from tests import models
from tests.noted import note_calls

BLOCK_SIZE = 4


def packer_of(memory: PagedMemory) -> PackedModel:
    return PackedModel(models.shared("llama"), memory)


def pack(packer: PackedModel, plan: Plan, sampled: Any = None) -> Any:
    """The forward of a plan, with its sequences and late tokens."""
    work = _decodes(plan, sampled) or _any_work(plan, sampled, {})
    forward, late = packer.pack(work.parts), work.parts.late
    own = {name: getattr(forward, name) for name in ("tokens", "step", "wanted")}
    return SimpleNamespace(**own, seqs=work.seqs, late=None if late is None else LateTokens(*late))


def started(memory: PagedMemory, num_tokens: int, name: str = "r") -> Sequence:
    """A sequence of which all tokens but the last are computed."""
    (seq,) = SequenceGroup(name, list(range(100, 100 + num_tokens))).sequences
    seq.num_computed_tokens = num_tokens - 1
    memory.manager.append(seq.seq_id, num_tokens - 1)
    memory.manager.drop_unseen(seq.seq_id)
    return seq


def append(memory: PagedMemory, seqs: list[Sequence]) -> Plan:
    memory.manager.append_all([(seq.seq_id, 1) for seq in seqs])
    return [(seq, 1) for seq in seqs]


def computed(memory: PagedMemory, seqs: list[Sequence]) -> None:
    for seq in seqs:
        seq.num_computed_tokens += 1
        seq.token_ids.append(100 + seq.num_computed_tokens)
        memory.manager.drop_unseen(seq.seq_id)


def assert_same(memory: PagedMemory, packed: Any, plan: Plan) -> None:
    expected = pack(packer_of(memory), plan)
    assert packed.tokens.tolist() == expected.tokens.tolist() and packed.seqs == expected.seqs
    step, wanted = packed.step, expected.step
    for name in ("positions", "seq_lens", "query_start_loc"):
        ours, theirs = getattr(step, name), getattr(wanted, name)
        assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist(), name
    for name in ("max_query_len", "max_short_query_len", "num_short_tokens", "max_seq_len", "shares"):
        assert getattr(step, name) == getattr(wanted, name), name
    for ours, theirs in zip(step.slots, wanted.slots, strict=True):
        assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()
    for ours, theirs in zip(step.block_tables, wanted.block_tables, strict=True):
        assert ours.dtype == theirs.dtype and ours.flags.c_contiguous and ours.tolist() == theirs.tolist()


def assert_records(found: list[AttentionMetadata], expected: list[AttentionMetadata]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.max_seq_len == theirs.max_seq_len and ours.shares == theirs.shares
        for name in ("block_tables", "slot_mapping", "seq_lens", "query_start_loc"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


CPU = torch.device("cpu")
GROUPS = (LayerGroup(FULL, frozenset({0})), LayerGroup(Window(6), frozenset({1})), LayerGroup(Chunk(6), frozenset({2})))


@pytest.mark.parametrize("is_on_cpu", [False, True])
@pytest.mark.parametrize("layout", [WHOLE, Layout(GROUPS)], ids=["one group", "three"])
def test_a_step_made_from_the_last_one(layout: Layout, is_on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences begin, end, share blocks, lose and regain them, and change places, at random."""
    made = note_calls(monkeypatch, DecodeArrays, "_next", lambda *_, **__: 1)
    followed = note_calls(monkeypatch, DecodeArrays, "_followed", lambda *_: 1)
    draw = random.Random(0)
    memory = PagedMemory(BLOCK_SIZE, 400 * len(layout.groups), layout=layout)
    packer = packer_of(memory)
    seqs = [started(memory, draw.randint(1, 9)) for _ in range(4)]
    for _ in range(300):
        plan = append(memory, seqs)
        assert_same(memory, packed := pack(packer, plan), plan)
        if is_on_cpu:
            moved = replace(packed.step, positions=packed.step.positions + 7)
            step = packed.step if len(seqs) % 2 else moved
            assert_records(packer._decode_arrays.metadata(step, CPU), step.metadata(CPU))
        event = draw.random()
        if event < 0.05:  # the forward failed: the same step again
            for seq in seqs:
                memory.crop(seq.seq_id, seq.num_computed_tokens)
            continue
        computed(memory, seqs)
        if event < 0.1 and len(seqs) > 2:
            memory.free(seqs.pop(draw.randrange(len(seqs))).seq_id)
        elif event < 0.2 and len(seqs) < 6:
            seqs.append(started(memory, draw.randint(1, 9)))
        elif event < 0.25:  # the same tokens in other blocks
            seq = draw.choice(seqs)
            memory.free(seq.seq_id)
            memory.manager.append(draw.random(), 1)
            memory.manager.append(seq.seq_id, seq.num_computed_tokens)
            memory.manager.drop_unseen(seq.seq_id)
        elif event < 0.3:  # copy-on-write in the next step
            memory.fork(draw.choice(seqs).seq_id, draw.random())
        elif event < 0.35:
            draw.shuffle(seqs)
    assert 100 < len(made) + len(followed) < 280 and bool(followed) == is_on_cpu


def test_a_common_prefix_is_found_when_it_becomes_long_enough() -> None:
    memory = PagedMemory(16, 200)
    first = started(memory, 250)
    second = first.copy()
    memory.fork(first.seq_id, second.seq_id)
    packer, found = packer_of(memory), []
    for _ in range(40):
        plan = append(memory, [first, second])
        packed = pack(packer, plan)
        assert_same(memory, packed, plan)
        found.append(packed.step.shares)
        computed(memory, [first, second])
    assert not any(found)  # the last blocks were copied
    third = first.copy()
    memory.fork(first.seq_id, third.seq_id)
    plan = append(memory, [first, third])
    assert pack(packer, plan).step.shares
    short = [started(memory, length) for length in (300, 20, 20)]  # the ends of short tables are no common block
    assert not pack(packer, append(memory, short)).step.shares


def sampled(seqs: list[Sequence], tokens: list[int]) -> Any:
    return SimpleNamespace(seqs=seqs, rows={seq: row for row, seq in enumerate(seqs)}, tokens=torch.tensor(tokens))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1,)], ids=str)
def test_tokens_that_only_the_device_knows(order: tuple[int, ...]) -> None:
    memory = PagedMemory(BLOCK_SIZE, 50)
    seqs = [started(memory, 3) for _ in range(3)]
    last = sampled(seqs, [7, 8, 9])
    for seq in seqs:
        seq.num_pending, seq.num_computed_tokens = 1, 3
        memory.append([(seq.seq_id, 1)])
    packed = pack(packer_of(memory), append(memory, [seqs[row] for row in order]), last)
    assert packed.late is not None and packed.wanted is None and packed.step.positions.tolist() == [3] * len(order)
    ids = torch.full((5,), -1)
    packed.late(ids)
    assert ids.tolist() == [*(last.tokens[row].item() for row in order), *[-1] * (5 - len(order))]


def test_a_chunk_of_one_token_is_no_decode_step() -> None:
    memory = PagedMemory(BLOCK_SIZE, 50)
    seq = started(memory, 6)
    seq.num_computed_tokens = 2
    memory.crop(seq.seq_id, 2)
    packed = pack(packer_of(memory), append(memory, [seq]))
    assert packed.seqs == [] and packed.tokens.tolist() == [102]
    assert packed.wanted is not None and packed.wanted.dtype == np.int64 and not len(packed.wanted)


def test_late_tokens_of_some_rows() -> None:
    ids = torch.zeros(4, dtype=torch.int64)
    LateTokens(torch.tensor([5, 6]), [(3, 0), (1, 1)])(ids)
    assert ids.tolist() == [0, 6, 0, 5]
