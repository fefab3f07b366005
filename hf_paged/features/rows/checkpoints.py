"""Decide which states of sequences are kept for later ones: checkpoints, found by the digests of their tokens.

A state (recurrent, convolution) cannot be taken apart by tokens, as K/V can. A *checkpoint* is a copy of it after a
number of full blocks of tokens, under the digest of the last of them. This module decides which ones there are; the
copies are in `States`. Knows digests, sequences by id and numbers; never tensors. Standard library only.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

UNPINNED = 3
"""Checkpoints that are never pinned, so that requests find the end of a prompt, where prompts branch, and a tail."""

# About 7 MiB of host memory at most.
MAX_SEEN = 1 << 16
"""Digests of prompts that are remembered, to find where prompts branch."""


@dataclass(frozen=True, slots=True)
class CheckpointRules:
    """Limits that a model and its memory set for checkpoints.

    count: checkpoints, more than UNPINNED, that there is always room for. seats: sequences of a step, at most; each
    free seat leaves room for `spare` more. in_pieces: a prompt may be computed in pieces of any length; otherwise it
    continues by one token at a time. num_blocks: the memory of a state, in blocks of the memory that it is in; there
    are then `count` checkpoints at most, as long as no sequence needs their memory. 0: they have a memory of their own.
    """

    count: int
    spare: int
    seats: int
    in_pieces: bool
    num_blocks: float = 0.0


@dataclass(slots=True)
class StateMoves:
    """Moves of states in a step, in this order. Once done, `clears` and `kept` are emptied: they are not done again if
    the step is broken off later.

    clears: drop all checkpoints. kept: (seq_id, num_tokens, checkpoint) to copy. restored: (checkpoint, seq_id,
    num_tokens): the sequence begins with it. dropped: checkpoints. lost: those in `kept` that found no memory.
    """

    clears: bool = False
    kept: list[tuple[int, int, int]] = field(default_factory=list)
    restored: list[tuple[int, int, int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.clears or self.kept or self.restored or self.dropped)


class Checkpoints:
    """The checkpoints by digest, the least recently used first.

    Invariant: there are at most `capacity` of them. A *tail* is the checkpoint of a running sequence: the next one
    takes its place, unless another sequence has begun with it. At most half of all may be tails when one is added.

    An interrupt may come between any two lines: a move is noted before what it stands for, and `recover` puts both in
    order.
    """

    def __init__(self, rules: CheckpointRules) -> None:
        self.rules = rules
        self.capacity = rules.count + rules.spare * rules.seats
        self.moves = StateMoves()  # since `take_moves`
        self._taken = self.moves  # by the last `take_moves`
        self._ids: OrderedDict[bytes, int] = OrderedDict()
        self._tails: dict[int, bytes] = {}  # by sequence, the oldest first
        self._owners: dict[bytes, int] = {}  # the sequences of the tails
        self._pinned: set[bytes] = set()
        self._seen: dict[bytes, None] = {}
        self._new_id = itertools.count().__next__

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._ids

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._ids)

    @property
    def num_spare(self) -> int:
        """Count the checkpoints that are not pinned."""
        return len(self._ids) - len(self._pinned)

    def take_moves(self) -> StateMoves:
        self._taken = self.moves
        self.moves = StateMoves()
        return self._taken

    def use(self, digest: bytes, seq_id: int, num_tokens: int) -> None:
        """Begin the sequence with this checkpoint."""
        self._touch(digest)
        # No tail from now on: the sequence that made it must not replace what another one has begun with.
        self._release(digest)
        self.moves.restored.append((self._ids[digest], seq_id, num_tokens))

    def keep(self, digest: bytes, seq_id: int, num_tokens: int, *, is_tail: bool) -> None:
        """Keep the state that the sequence has now, after `num_tokens` tokens."""
        if is_tail:
            self._drop_tail(seq_id)
        if digest in self._ids:
            self._touch(digest)
            if not is_tail:
                self._release(digest)
            return
        if is_tail:
            # Tails serve the next turn of one conversation; the other half is left for prompts that many share.
            while len(self._tails) >= max(self.capacity // 2, 1):
                self._drop_tail(next(iter(self._tails)))
        if len(self._pinned) >= self.capacity:
            return
        self._shrink(self.capacity - 1)
        number = self._new_id()
        # The move first: after an interrupt, `recover` leaves out a copy whose checkpoint was not listed.
        self.moves.kept.append((seq_id, num_tokens, number))
        self._ids[digest] = number
        if is_tail:
            self._tails[seq_id], self._owners[digest] = digest, seq_id

    def end(self, seq_id: int) -> None:
        """Note that the sequence has ended: its tail stays."""
        # The next turn of a conversation begins with it.
        if (digest := self._tails.get(seq_id)) is not None:
            self._release(digest)

    def lose(self, seq_id: int) -> None:
        """Drop the tail of a beam that was given up."""
        self._drop_tail(seq_id)

    def fit(self, num_seqs: int, num_available: int) -> None:
        """Drop checkpoints until the rest fits beside the next step: its sequences, and the blocks that nothing else
        takes."""
        rules = self.rules
        if rules.num_blocks:
            self.capacity = min(len(self) + int(num_available / rules.num_blocks), rules.count)
        else:
            self.capacity = rules.count + rules.spare * max(rules.seats - num_seqs, 0)
        self._shrink(self.capacity)

    def give_up(self) -> bool:
        """Drop the least recently used one that is not pinned. False: there is none."""
        if not self.num_spare:
            return False
        self._shrink(len(self._ids) - 1)
        return True

    def pin(self, digest: bytes) -> None:
        """Keep it until `unpin`. Raises ValueError if those that are pinned leave no room."""
        if digest not in self._pinned and len(self._pinned) >= self.rules.count - UNPINNED:
            raise ValueError(
                f"{len(self._pinned)} prefixes are kept, and the memory holds the states of no more; release one, or "
                f"give the engine {'' if self.rules.num_blocks else 'a larger max_num_seqs and '}more memory"
            )
        # What is pinned is nobody's tail, so that the next one of its sequence does not take its place.
        self._release(digest)
        self._pinned.add(digest)

    def unpin(self, digest: bytes) -> None:
        self._pinned.discard(digest)

    def drop(self, digest: bytes) -> None:
        """Drop the checkpoint with this digest, unless it is pinned or does not exist."""
        if digest in self._ids and digest not in self._pinned:
            self._release(digest)
            # The move first: after an interrupt, `recover` also removes a checkpoint that is still listed.
            self.moves.dropped.append(self._ids[digest])
            del self._ids[digest]

    def lose_copies(self, numbers: Iterable[int]) -> None:
        """Forget checkpoints whose copies found no memory."""
        lost = set(numbers)
        for digest in [digest for digest, number in self._ids.items() if number in lost]:
            self._release(digest)
            self._pinned.discard(digest)
            del self._ids[digest]

    def recover(self) -> None:
        """Repair the records after a step was broken off and all sequences have ended. The next step makes up for
        undone moves, before the states of the sequences are freed."""
        self._tails.clear()
        self._owners.clear()
        self.lose_copies(self._taken.lost)
        undone = [self.moves] if self._taken is self.moves else [self._taken, self.moves]
        dropped = [number for moves in undone for number in moves.dropped]
        for digest in [digest for digest, number in self._ids.items() if number in dropped]:
            del self._ids[digest]
        made = set(self._ids.values())
        kept = [row for moves in undone for row in moves.kept if row[2] in made]
        self.moves = StateMoves(any(moves.clears for moves in undone), kept, dropped=dropped)

    def clear(self) -> None:
        """Drop all, pinned or not, and forget the prompts."""
        self._ids.clear()
        self._tails.clear()
        self._owners.clear()
        self._pinned.clear()
        self._seen.clear()
        self.moves = StateMoves(clears=True)

    # -- where prompts branch -----------------------------------------------------------------------------------

    def num_seen(self, digests: Sequence[bytes]) -> int:
        """Leading digests that an earlier prompt had too."""
        return next((index for index, digest in enumerate(digests) if digest not in self._seen), len(digests))

    def note(self, digests: Iterable[bytes]) -> None:
        """Remember the digests of a prompt."""
        for digest in digests:
            # To the end: the digests that were seen longest ago are forgotten first.
            self._seen.pop(digest, None)
            self._seen[digest] = None
        while len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]

    # -- parts --------------------------------------------------------------------------------------------------

    def _touch(self, digest: bytes) -> None:
        self._ids.move_to_end(digest)

    def _release(self, digest: bytes) -> None:
        """Make the checkpoint an ordinary one if it was a tail."""
        if (owner := self._owners.pop(digest, None)) is not None:
            del self._tails[owner]

    def _drop_tail(self, seq_id: int) -> None:
        if (digest := self._tails.get(seq_id)) is not None:
            self.drop(digest)

    def _shrink(self, most: int) -> None:
        """Drop the least recently used ones, until there are at most `most`, or all are pinned."""
        while len(self._ids) > max(most, len(self._pinned)):
            self.drop(next(digest for digest in self._ids if digest not in self._pinned))

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant of the class does not hold."""
        assert len(self._ids) <= max(self.capacity, len(self._pinned)), "there are too many checkpoints"
        assert len(self._pinned) + UNPINNED <= self.rules.count, "too many checkpoints are pinned"
        assert {digest: seq_id for seq_id, digest in self._tails.items()} == self._owners
        assert self._pinned | set(self._owners) <= set(self._ids)
