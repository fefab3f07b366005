"""States: what layers keep of a sequence outside blocks, such as convolution and recurrent states.

A *state* is a tree of dicts, lists and tuples whose tensors have one row for each sequence of a batch (dim 0). A
forward of several sequences takes their rows, joined into one batch, changes it in place, and puts it back. While the
same sequences decode, nothing is copied. Knows sequences by id and by their number of tokens; never layers or models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged.kernels.metadata import to_device

Tree = Any
"""None, a number, or another value that is never changed; a tensor; or a dict, list or tuple of trees."""

SizesOfTensors = dict[torch.device, list[int]]
"""Bytes of each tensor of a state, by device."""

MAX_SHAPES = 256
"""Shapes that are remembered to be the same. Sequences whose shape was forgotten are not joined with others once."""

_Shape = Any  # a tree without its tensors, which can be compared and hashed


class _Tensor(NamedTuple):
    """The place of a tensor in a shape. size: that of a row; None for a tensor without rows."""

    size: tuple[int, ...] | None
    dtype: torch.dtype


class _Batch:
    """Rows of several sequences. devices: on which a forward needs its tensors, if that is not where they are.
    is_kept: it is a checkpoint's, which no forward may change. users: the sequences whose rows these are, which may
    share them."""

    __slots__ = ("devices", "is_kept", "number", "shape", "tensors", "users")

    def __init__(
        self,
        shape: _Shape,
        number: int,
        tensors: list[torch.Tensor],
        devices: list[torch.device] | None = None,
        *,
        is_kept: bool = False,
    ) -> None:
        self.shape = shape
        self.number = number  # of the shape
        self.tensors = tensors
        self.devices = devices
        self.is_kept = is_kept
        self.users: dict[int, None] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def num_rows(self) -> int:
        return max((len(tensor) for tensor in self.tensors if tensor.ndim), default=1)


class _Row(NamedTuple):
    batch: _Batch
    place: int
    num_tokens: int


class States:
    """The state of each sequence, after a number of tokens, and checkpoints: copies of such states.

    Invariant: a sequence has one state or none. `take` hands it over to a forward, which changes it in place, and `put`
    takes it back: there is no second copy. A forward that is broken off therefore loses the states of its sequences
    (`has` tells), which must be computed again from their tokens. A fork shares the row of its parent until one of them
    is computed. No forward changes a checkpoint.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}  # by sequence
        self._ragged: dict[_Batch, None] = {}  # batches that lost a user
        self.checkpoints: dict[int, _Row] = {}  # by number; each in a batch of its own
        self._numbers: dict[_Shape, int] = {}  # of the shapes met lately
        self._next_number = 0

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def has(self, seq_id: int, num_tokens: int) -> bool:
        """Return True if there is the state of the sequence after `num_tokens` tokens."""
        row = self._rows.get(seq_id)
        return row is not None and row.num_tokens == num_tokens

    def shape_number(self, seq_id: int, num_tokens: int) -> int:
        """Return a number that is equal for sequences whose rows can be joined: only values of tensors differ."""
        return self._row(seq_id, num_tokens).batch.number

    def bytes_of(self, seq_id: int, num_tokens: int) -> SizesOfTensors:
        """Bytes of each tensor of the state of a sequence, by device."""
        sizes: SizesOfTensors = {}
        for tensor in self._row(seq_id, num_tokens).batch.tensors:
            count = len(tensor) if tensor.ndim else 1
            sizes.setdefault(tensor.device, []).append(tensor.nbytes // count)
        return sizes

    def joined(self, rows: Sequence[tuple[int, int]]) -> Tree:
        """A copy of the states of (seq_id, num_tokens), in this order, as one tree. Their shapes are the same."""
        runs = _runs([self._row(*row) for row in rows])
        tensors = (_joined(runs, place) for place in range(len(runs[0][0].tensors)))
        return _tree(runs[0][0].shape, tensors)

    def take(self, rows: Sequence[tuple[int, int]]) -> Tree:
        """Join states as `joined` does, to be changed: the sequences have no state until `put`.

        A batch of exactly these sequences is handed over as it is. Otherwise tensors are joined one after the other,
        and each batch that has no other user gives up its tensor as soon as that is copied.
        """
        found = [self._row(*row) for row in rows]
        runs, first = _runs(found), found[0].batch
        is_whole = len(runs) == 1 and runs[0][1] == [*range(first.num_rows)] and first.devices is None
        for seq_id, _ in rows:
            self._remove(seq_id)
        given_up = [batch for batch in {row.batch: None for row in found} if not batch.users and not batch.is_kept]
        # Handed over without a copy: nobody else reads these rows.
        if is_whole and given_up:
            return _tree(first.shape, iter(first.tensors))
        tensors = []
        for place in range(len(first.tensors)):
            tensors.append(_joined(runs, place))
            for batch in given_up:
                # Tensor by tensor, so that only the largest is there twice.
                batch.tensors[place] = tensors[-1].new_empty(0)
        return _tree(first.shape, iter(tensors))

    def put(self, rows: Sequence[tuple[int, int]], tree: Tree) -> None:
        """Row i of the tree is from now on the state of a sequence after a number of tokens, `rows[i]`."""
        tensors: list[torch.Tensor] = []
        shape = _shape(tree, tensors)
        if wrong := [tensor for tensor in tensors if tensor.ndim and len(tensor) != len(rows)]:
            raise ValueError(f"a state of shape {tuple(wrong[0].shape)} for {len(rows)} sequences")
        batch = _Batch(shape, self._number(shape), tensors)
        for index, (seq_id, num_tokens) in enumerate(rows):
            self._set(seq_id, _Row(batch, index, num_tokens))
        self._compact()

    def _row(self, seq_id: int, num_tokens: int) -> _Row:
        row = self._rows[seq_id]
        if row.num_tokens != num_tokens:
            raise KeyError(f"the state of sequence {seq_id} after {num_tokens} tokens; there is one after {row[2]}")
        return row

    def _set(self, seq_id: int, row: _Row) -> None:
        self._remove(seq_id)
        row.batch.users[seq_id] = None
        self._rows[seq_id] = row

    def _remove(self, seq_id: int) -> None:
        if (row := self._rows.pop(seq_id, None)) is not None:
            users = row.batch.users
            users.pop(seq_id, None)
            if users and not row.batch.is_kept:
                self._ragged[row.batch] = None
            else:
                self._ragged.pop(row.batch, None)

    def _number(self, shape: _Shape) -> int:
        number = self._numbers.get(shape)
        if number is None:
            # A limit, because a state that grows has a shape for each length.
            if len(self._numbers) == MAX_SHAPES:
                self._numbers.clear()
            number = self._numbers[shape] = self._next_number
            self._next_number += 1
        return number

    def _compact(self) -> None:
        """Copy used rows out of batches that also have unused rows."""
        for batch in self._ragged:
            places = sorted({self._rows[seq_id].place for seq_id in batch.users})
            if len(places) == batch.num_rows:
                continue  # forks share the rows of those that have left
            copy = _Batch(batch.shape, batch.number, [_kept(t, places) for t in batch.tensors], batch.devices)
            for seq_id in [*batch.users]:
                _, place, num_tokens = self._rows[seq_id]
                copy.users[seq_id] = None
                self._rows[seq_id] = _Row(copy, places.index(place), num_tokens)
        self._ragged.clear()

    def fork(self, parent_id: int, child_id: int) -> None:
        """`child_id` has the state of `parent_id`, if that has one."""
        if parent_id in self._rows:
            self._set(child_id, self._rows[parent_id])

    def to_host(self, seq_id: int, num_tokens: int) -> None:
        """Move the state of a sequence after `num_tokens` tokens to host memory, from which forwards copy it."""
        if not self.has(seq_id, num_tokens):
            return
        batch, index, _ = self._rows[seq_id]
        if batch.devices is None and any(tensor.device.type != "cpu" for tensor in batch.tensors):
            # Its own row alone, because others of the batch may still be needed on the device.
            rows = [_kept(tensor, [index]) for tensor in batch.tensors]
            devices = [tensor.device for tensor in rows]
            moved = _Batch(batch.shape, batch.number, [tensor.to("cpu") for tensor in rows], devices)
            self._set(seq_id, _Row(moved, 0, num_tokens))

    def free(self, seq_id: int) -> None:
        self._remove(seq_id)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def keep(self, seq_id: int, num_tokens: int, number: int) -> None:
        """Copy the state of the sequence."""
        batch, index, _ = self._row(seq_id, num_tokens)
        copy = _Batch(batch.shape, batch.number, [_copied(tensor, [index]) for tensor in batch.tensors], is_kept=True)
        self.checkpoints[number] = _Row(copy, 0, num_tokens)

    def restore(self, number: int, seq_id: int, num_tokens: int) -> None:
        """The sequence has the state of a checkpoint, which no forward changes."""
        self._set(seq_id, self.checkpoints[number]._replace(num_tokens=num_tokens))

    def drop(self, number: int) -> None:
        self.checkpoints.pop(number, None)

    # -----------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        self._rows.clear()
        self._ragged.clear()
        self.checkpoints.clear()

    @property
    def nbytes(self) -> int:
        """Size of all batches."""
        rows = (*self._rows.values(), *self.checkpoints.values())
        return sum(batch.nbytes for batch in {row.batch for row in rows})


def is_tree(value: object) -> bool:
    """Return True if the value is a tree that can be copied: every part of it is of a known kind."""
    try:
        _shape(value, [])
    except TypeError:
        return False
    return True


def _runs(rows: Sequence[_Row]) -> list[tuple[_Batch, list[int]]]:
    """The places of neighbours that come from one batch."""
    runs: list[tuple[_Batch, list[int]]] = []
    for batch, place, _ in rows:
        if not runs or runs[-1][0] is not batch:
            runs.append((batch, []))
        runs[-1][1].append(place)
    return runs


def _joined(runs: Sequence[tuple[_Batch, list[int]]], place: int) -> torch.Tensor:
    """A copy of these rows of the tensor at a place."""
    parts = []
    for batch, indexes in runs:
        copy = _copied(batch.tensors[place], indexes)
        parts.append(copy if batch.devices is None else copy.to(batch.devices[place]))
    return parts[0] if len(parts) == 1 or not parts[0].ndim else torch.cat(parts)


def _selected(tensor: torch.Tensor, indexes: list[int]) -> torch.Tensor:
    """A copy of these rows."""
    if indexes == [*range(len(tensor))]:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.index_select(0, to_device(np.array(indexes, dtype=np.int64), tensor.device))


def _kept(tensor: torch.Tensor, indexes: list[int]) -> torch.Tensor:
    return _selected(tensor, indexes) if tensor.ndim else tensor


def _copied(tensor: torch.Tensor, indexes: list[int]) -> torch.Tensor:
    return _selected(tensor, indexes) if tensor.ndim else tensor.clone()


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def _shape(tree: Tree, tensors: list[torch.Tensor]) -> _Shape:
    """The shape of a tree, whose tensors are appended to `tensors`. Raises TypeError for a value that may change."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return _Tensor(tuple(tree.shape[1:]), tree.dtype) if tree.ndim else (_Tensor(None, tree.dtype), tree.item())
    if isinstance(tree, dict):
        return dict, tuple((key, _shape(value, tensors)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree), tuple(_shape(value, tensors) for value in tree)
    if not isinstance(tree, _PLAIN):
        raise TypeError(f"a state has a {type(tree).__name__} in it, of which it is unknown how it is copied")
    return tree


def _tree(shape: _Shape, tensors: Iterator[torch.Tensor]) -> Tree:
    if isinstance(shape, _Tensor):
        return next(tensors)
    if not isinstance(shape, tuple) or not shape:
        return shape
    kind, parts = shape
    if kind is dict:
        return {key: _tree(part, tensors) for key, part in parts}
    if kind in (list, tuple):
        return kind(_tree(part, tensors) for part in parts)
    # A tensor without rows, with its value.
    return next(tensors)
