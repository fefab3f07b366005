"""States: what layers keep of a sequence outside blocks, such as convolution and recurrent states.

A *state* is a tree of dicts, lists and tuples whose tensors have one row for each sequence of a batch (dim 0). A
forward of several sequences takes a copy of their rows, joined into one batch, changes it in place, and puts it back as
a new batch. Knows sequences by id and by their number of tokens; never layers or models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged.kernels.metadata import to_device

Tree = Any
"""None, a number, or another value that is never changed; a tensor; or a dict, list or tuple of trees."""

MAX_SHAPES = 256
"""Shapes that are remembered to be the same. Sequences whose shape was forgotten are not joined with others once."""

_Shape = Any  # a tree without its tensors, which can be compared and hashed


class _Tensor(NamedTuple):
    """The place of a tensor in a shape. size: that of a row; None for a tensor without rows."""

    size: tuple[int, ...] | None
    dtype: torch.dtype


class _Batch:
    """Rows of several sequences. Its tensors are never changed. devices: on which a forward needs its tensors, if that
    is not where they are."""

    __slots__ = ("devices", "number", "shape", "tensors")

    def __init__(
        self,
        shape: _Shape,
        number: int,
        tensors: list[torch.Tensor],
        devices: list[torch.device] | None = None,
    ) -> None:
        self.shape = shape
        self.number = number  # of the shape
        self.tensors = tensors
        self.devices = devices

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class _Row(NamedTuple):
    batch: _Batch
    place: int


class States:
    """The states of sequences, each after one or two numbers of tokens, and checkpoints: copies of such states.

    Invariant: no batch is changed once it is here. A fork therefore copies nothing, and a step that was interrupted is
    computed again from the same rows: `put` adds a row, and the former one is dropped by the next `begin_step`.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, _Row]] = {}  # by sequence, then by the number of its tokens
        self._bases: dict[int, int] = {}  # the number of tokens with which the step in progress began, if one was begun
        self._checkpoints: dict[int, _Row] = {}  # by number; each in a batch of its own
        self._numbers: dict[_Shape, int] = {}  # of the shapes met lately
        self._next_number = 0

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def begin_step(self, seq_id: int, num_tokens: int) -> None:
        """Drop what is kept of the sequence after other numbers of tokens."""
        self._bases[seq_id] = num_tokens
        rows = self._rows.get(seq_id)
        if rows is not None and (len(rows) > 1 or num_tokens not in rows):
            self._rows[seq_id] = {length: row for length, row in rows.items() if length == num_tokens}

    def shape_number(self, seq_id: int, num_tokens: int) -> int:
        """Sequences with the same number here can be joined: their rows differ only in the values of tensors."""
        return self._rows[seq_id][num_tokens].batch.number

    def bytes_of(self, seq_id: int, num_tokens: int) -> dict[torch.device, int]:
        """Bytes of the state of a sequence on each device."""
        sizes: dict[torch.device, int] = {}
        for tensor in self._rows[seq_id][num_tokens].batch.tensors:
            count = len(tensor) if tensor.ndim else 1
            sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.nbytes // count
        return sizes

    def joined(self, rows: Sequence[tuple[int, int]]) -> Tree:
        """A copy of the states of (seq_id, num_tokens), in this order, as one tree. Their shapes are the same."""
        found = [self._rows[seq_id][num_tokens] for seq_id, num_tokens in rows]
        runs: list[tuple[_Batch, list[int]]] = []  # neighbours that come from one batch
        for batch, index in found:
            if not runs or runs[-1][0] is not batch:
                runs.append((batch, []))
            runs[-1][1].append(index)
        first = runs[0][0]
        tensors = []
        for place, tensor in enumerate(first.tensors):
            if not tensor.ndim:
                tensors.append(_on_device(first, place, tensor.clone()))
                continue
            parts = [_on_device(batch, place, _selected(batch.tensors[place], indexes)) for batch, indexes in runs]
            tensors.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return _tree(first.shape, iter(tensors))

    def put(self, rows: Sequence[tuple[int, int]], tree: Tree) -> None:
        """Row i of the tree is from now on the state of a sequence after a number of tokens, `rows[i]`."""
        tensors: list[torch.Tensor] = []
        shape = _shape(tree, tensors)
        if wrong := [tensor for tensor in tensors if tensor.ndim and len(tensor) != len(rows)]:
            raise ValueError(f"a state of shape {tuple(wrong[0].shape)} for {len(rows)} sequences")
        batch = _Batch(shape, self._number(shape), tensors)
        for index, (seq_id, num_tokens) in enumerate(rows):
            own = self._rows.setdefault(seq_id, {})
            own[num_tokens] = _Row(batch, index)
            if (base := self._bases.get(seq_id)) is not None:
                for length in [each for each in own if each not in (num_tokens, base)]:
                    del own[length]
        self._compact()

    def _number(self, shape: _Shape) -> int:
        number = self._numbers.get(shape)
        if number is None:
            if len(self._numbers) == MAX_SHAPES:  # a state that grows has a shape for each length
                self._numbers.clear()
            number = self._numbers[shape] = self._next_number
            self._next_number += 1
        return number

    def _compact(self) -> None:
        """Copy rows out of batches of which less than half is still in use."""
        used: dict[_Batch, dict[int, None]] = {}
        for rows in self._rows.values():
            for batch, index in rows.values():
                used.setdefault(batch, {})[index] = None
        if len(used) < 3:  # those of the last two steps
            return
        sizes = {batch: max((len(t) for t in batch.tensors if t.ndim), default=1) for batch in used}
        moved = {
            batch: (_Batch(batch.shape, batch.number, [_kept(t, [*indexes]) for t in batch.tensors]), [*indexes])
            for batch, indexes in used.items()
            if 2 * len(indexes) < sizes[batch]
        }
        if not moved:
            return
        for rows in self._rows.values():
            for num_tokens, (batch, index) in rows.items():
                if batch in moved:
                    copy, indexes = moved[batch]
                    rows[num_tokens] = _Row(copy, indexes.index(index))

    def fork(self, parent_id: int, child_id: int) -> None:
        """`child_id` has the state of `parent_id`, if that has one."""
        if parent_id in self._rows:
            self._rows[child_id] = dict(self._rows[parent_id])

    def reorder(self, seq_ids: Sequence[int], parents: Sequence[int]) -> None:
        """Sequence `seq_ids[i]` has the state of `seq_ids[parents[i]]`."""
        self._rows.update({seq_id: dict(self._rows[seq_ids[parent]]) for seq_id, parent in zip(seq_ids, parents)})

    def to_host(self, seq_id: int, num_tokens: int) -> None:
        """Move the state of a sequence to host memory, from which `joined` copies it, and drop the one after another
        number of tokens."""
        row = self._rows.get(seq_id, {}).get(num_tokens)
        if row is None:
            return
        batch, index = row
        if batch.devices is None and any(tensor.device.type != "cpu" for tensor in batch.tensors):
            rows = [_kept(tensor, [index]) for tensor in batch.tensors]
            devices = [tensor.device for tensor in rows]
            row = _Row(_Batch(batch.shape, batch.number, [tensor.to("cpu") for tensor in rows], devices), 0)
        self._rows[seq_id] = {num_tokens: row}

    def free(self, seq_id: int) -> None:
        self._rows.pop(seq_id, None)
        self._bases.pop(seq_id, None)

    # -- checkpoints --------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> list[int]:
        """Their numbers."""
        return list(self._checkpoints)

    def keep(self, seq_id: int, num_tokens: int, number: int) -> None:
        """Copy the state of the sequence."""
        batch, index = self._rows[seq_id][num_tokens]
        copy = _Batch(batch.shape, batch.number, [_kept(tensor, [index]) for tensor in batch.tensors])
        self._checkpoints[number] = _Row(copy, 0)

    def restore(self, number: int, seq_id: int, num_tokens: int) -> None:
        """The sequence has the state of a checkpoint, which no forward changes."""
        self._rows[seq_id] = {num_tokens: self._checkpoints[number]}

    def drop(self, number: int) -> None:
        self._checkpoints.pop(number, None)

    def drop_checkpoints(self) -> None:
        self._checkpoints.clear()

    # -----------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        self._rows.clear()
        self._bases.clear()
        self._checkpoints.clear()

    @property
    def nbytes(self) -> int:
        """Size of all batches."""
        rows = [row for rows in self._rows.values() for row in rows.values()]
        return sum(batch.nbytes for batch in {row.batch for row in (*rows, *self._checkpoints.values())})


def is_tree(value: Any) -> bool:
    """Whether the value is a tree: there is nothing in it of which it is unknown how it is copied."""
    try:
        _shape(value, [])
    except TypeError:
        return False
    return True


def _on_device(batch: _Batch, place: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if batch.devices is None else tensor.to(batch.devices[place])


def _selected(tensor: torch.Tensor, indexes: list[int]) -> torch.Tensor:
    """A copy of these rows."""
    if indexes == [*range(len(tensor))]:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.index_select(0, to_device(np.array(indexes, dtype=np.int64), tensor.device))


def _kept(tensor: torch.Tensor, indexes: list[int]) -> torch.Tensor:
    return _selected(tensor, indexes) if tensor.ndim else tensor


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
    return next(tensors)  # a tensor without rows, with its value
