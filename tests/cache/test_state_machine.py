"""Block tables against a model of plain lists, after every operation, with the device's slots simulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import NULL_BLOCK, BlockCopy, BlockManager
from hf_paged.cache.layers import FULL, Chunk, Kind, LayerGroup, Window
from hf_paged.cache.prefix_cache import PrefixCache, root_digest
from hf_paged.errors import OutOfBlocks

ROOT = root_digest("model")
TOKENS = st.integers(0, 1)  # few, so that prefixes meet
PICK = st.integers(0, 10**6)


def kv_of(tokens: list[int], position: int, group: int) -> bytes:
    """The value that the forward writes for one token; like K/V it depends on the whole prefix."""
    return sha256(repr((group, position, tokens[: position + 1])).encode()).digest()


@dataclass
class Store:
    """A manager and the memory that it manages. `seqs` is the model: the tokens that each sequence should read back."""

    manager: BlockManager
    slots: dict[int, bytes] = field(default_factory=dict)
    seqs: dict[int, list[int]] = field(default_factory=dict)
    readable_from: dict[int, list[int]] = field(default_factory=dict)  # by group: positions below left the window

    def state(self) -> object:
        manager, allocator = self.manager, self.manager.allocator
        tables = {s: (manager.num_tokens(s), list(map(list, manager.block_tables(s)))) for s in manager.seq_ids}
        counts = [allocator.ref_count(b) for b in range(allocator.num_blocks)]
        return tables, counts, allocator.num_free, allocator.num_cached, manager.num_copies

    def copy(self, copies: list[BlockCopy], source: Store) -> None:
        """Perform the copies of one step in any order, because they must not depend on each other."""
        size = self.manager.block_size
        sources, destinations = [c.src for c in copies], [c.dst for c in copies]
        assert len(set(destinations)) == len(destinations)
        assert source is not self or not set(sources) & set(destinations)
        for src, dst in copies:
            for offset in range(size):
                if (slot := src * size + offset) in source.slots:
                    self.slots[dst * size + offset] = source.slots[slot]
                else:
                    self.slots.pop(dst * size + offset, None)

    def write(self, seq_id: int, start: int) -> None:
        tokens, size = self.seqs[seq_id], self.manager.block_size
        for group in self.groups:
            for position, slot in enumerate(self.manager.slots(seq_id, start, len(tokens), group), start):
                assert self.manager.allocator.ref_count(slot // size) == 1, "a shared block is written"
                assert slot // size not in self.manager.cached_blocks, "a block that can be found by hash is written"
                self.slots[slot] = kv_of(tokens, position, group)

    @property
    def groups(self) -> range:
        return range(len(self.manager.groups))

    def held(self, seq_id: int) -> list[int]:
        return [b for table in self.manager.block_tables(seq_id) for b in table if b != NULL_BLOCK]

    def check(self, pinned: int = 0) -> None:
        manager, allocator, size = self.manager, self.manager.allocator, self.manager.block_size
        manager.check_integrity()
        assert allocator.num_free + allocator.num_used + allocator.num_cached == allocator.num_blocks
        assert len(manager) == len(self.seqs) + pinned
        held: dict[int, int] = {}
        for seq_id in manager.seq_ids:
            table = self.held(seq_id)
            assert len(set(table)) == len(table)
            for block_id in table:
                held[block_id] = held.get(block_id, 0) + 1
        assert allocator.num_used == len(held)
        assert all(allocator.ref_count(b) == held.get(b, 0) for b in range(allocator.num_blocks))
        for seq_id, tokens in self.seqs.items():
            assert manager.num_tokens(seq_id) == len(tokens)
            for group, start in enumerate(self.readable_from[seq_id]):
                assert len(manager.block_table(seq_id, group)) == -(-len(tokens) // size)
                read = [self.slots.get(slot) for slot in manager.slots(seq_id, start, len(tokens), group)]
                assert read == [kv_of(tokens, position, group) for position in range(start, len(tokens))]


class BlockMachine(RuleBasedStateMachine):
    """Every operation of BlockManager on a device store and a host store."""

    windows: tuple[int | None, ...] = (None,)  # of each group: the longest window or chunk that may be drawn
    caching = False

    @initialize(
        num_blocks=st.integers(1, 12), num_host_blocks=st.integers(0, 6), block_size=st.integers(1, 4), data=st.data()
    )
    def start(self, num_blocks: int, num_host_blocks: int, block_size: int, data: st.DataObject) -> None:
        lengths: dict[int | None, Kind] = {
            most: data.draw(st.sampled_from((Window, Chunk)))(data.draw(st.integers(1, most)))
            for most in self.windows
            if most is not None
        }
        groups = [LayerGroup(FULL if most is None else lengths[most]) for most in self.windows]
        num_blocks, num_host_blocks = num_blocks * len(groups), num_host_blocks * len(groups)
        self.device = Store(BlockManager(BlockAllocator(num_blocks), block_size, groups=groups))
        self.host = Store(BlockManager(BlockAllocator(num_host_blocks), block_size, groups=groups))
        self.cache = PrefixCache(self.device.manager) if self.caching else None
        self.preempted: list[list[int]] = []  # by recompute
        self.next_id = 0

    # -- choosing -----------------------------------------------------------------------------------------------

    def pick(self, number: int, store: Store | None = None) -> int:
        seqs = list((store or self.device).seqs)
        return seqs[number % len(seqs)]

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def has_seqs(self) -> bool:
        return bool(self.device.seqs)

    def has_swapped(self) -> bool:
        return bool(self.host.seqs)

    def has_preempted(self) -> bool:
        return bool(self.preempted)

    def has_cache(self) -> bool:
        return self.caching

    # -- the verbs ----------------------------------------------------------------------------------------------

    def append_to(self, appends: list[tuple[int, list[int]]]) -> bool:
        """One step: append to all, copy, write. Returns False, and changes nothing, if there are too few blocks."""
        store, manager = self.device, self.device.manager
        counts = [(seq_id, len(tokens)) for seq_id, tokens in appends]
        needed, available = manager.num_blocks_to_append_all(counts), manager.allocator.num_available
        before = store.state()
        if needed > available:
            if len(counts) == 1:
                with pytest.raises(OutOfBlocks) as error:
                    manager.append(*counts[0])
                assert (error.value.needed, error.value.available) == (needed, available)
            assert store.state() == before
            return False
        copies = [copy for seq_id, count in counts for copy in manager.append(seq_id, count)]
        assert available - manager.allocator.num_available == needed
        store.copy(copies, store)
        for seq_id, tokens in appends:
            old = store.seqs.setdefault(seq_id, [])
            store.readable_from.setdefault(seq_id, [0 for _ in store.groups])
            old.extend(tokens)
            store.write(seq_id, len(old) - len(tokens))
            self.register(seq_id)
        return True

    def forget(self, store: Store, seq_id: int) -> list[int]:
        del store.readable_from[seq_id]
        return store.seqs.pop(seq_id)

    @rule(tokens=st.lists(TOKENS, max_size=9))
    def create(self, tokens: list[int]) -> None:
        self.append_to([(self.new_id(), tokens)])

    @precondition(has_seqs)
    @rule(number=PICK, tokens=st.lists(TOKENS, max_size=5))
    def append(self, number: int, tokens: list[int]) -> None:
        self.append_to([(self.pick(number), tokens)])

    @precondition(has_seqs)
    @rule(count=st.integers(1, 6), token=TOKENS, branch=st.booleans())
    def decode(self, count: int, token: int, branch: bool) -> None:
        seqs = list(self.device.seqs)[:count]
        self.append_to([(seq_id, [token ^ (branch and seq_id & 1)]) for seq_id in seqs])

    @precondition(has_seqs)
    @rule(number=PICK)
    def fork(self, number: int) -> None:
        parent, child, available = self.pick(number), self.new_id(), self.device.manager.allocator.num_available
        self.device.manager.fork(parent, child)
        assert self.device.manager.allocator.num_available == available
        self.device.seqs[child] = self.device.seqs[parent][:]
        self.device.readable_from[child] = self.device.readable_from[parent][:]
        with pytest.raises(ValueError, match="exists already"):
            self.device.manager.fork(parent, child)

    @precondition(has_seqs)
    @rule(number=PICK)
    def free(self, number: int) -> None:
        seq_id = self.pick(number)
        self.device.manager.free(seq_id)
        self.forget(self.device, seq_id)
        with pytest.raises(KeyError):
            self.device.manager.free(seq_id)

    @precondition(has_seqs)
    @rule(number=PICK, share=st.floats(0, 1))
    def crop(self, number: int, share: float) -> None:
        seq_id, manager = self.pick(number), self.device.manager
        tokens = self.device.seqs[seq_id]
        keep, before = int(share * len(tokens)), self.device.state()
        with pytest.raises(ValueError, match="has"):
            manager.crop(seq_id, len(tokens) + 1)
        try:
            manager.crop(seq_id, keep)
        except ValueError:
            assert self.device.state() == before
            # A token at `keep` would attend to a block that has been freed.
            first_seen = [group.kind.first_visible(keep) // manager.block_size for group in manager.groups]
            assert NULL_BLOCK in [table[i] for table, i in zip(manager.block_tables(seq_id), first_seen)]
            return
        del tokens[keep:]
        self.device.readable_from[seq_id] = [min(start, keep) for start in self.device.readable_from[seq_id]]

    @precondition(has_seqs)
    @rule(number=PICK)
    def preempt(self, number: int) -> None:
        seq_id = self.pick(number)
        self.device.manager.free(seq_id)
        self.preempted.append(self.forget(self.device, seq_id))

    @precondition(has_preempted)
    @rule(number=PICK)
    def resume(self, number: int) -> None:
        """Recompute the tokens after the prefix cache's hit, or all of them without a hit."""
        tokens, seq_id, store = self.preempted.pop(number % len(self.preempted)), self.new_id(), self.device
        tables: list[list[int]] = [[] for _ in store.groups]
        if self.cache is not None:
            prefix = self.cache.match(tokens, ROOT)
            tables = prefix.tables
            assert prefix.num_blocks == self.longest_hit(tokens), "not the longest prefix that is cached"
        size = store.manager.block_size
        num_hits = len(tables[0]) * size
        assert num_hits < len(tokens) or not num_hits
        store.manager.adopt(seq_id, tables, len(tables[0]))
        store.seqs[seq_id] = tokens[:num_hits]
        store.readable_from[seq_id] = [table.count(NULL_BLOCK) * size for table in tables]
        store.check(self.num_pins)
        if not self.append_to([(seq_id, tokens[num_hits:])]):
            self.preempted.append(tokens)
            store.manager.free(seq_id)
            self.forget(store, seq_id)

    def move(self, seq_ids: list[int], source: Store, target: Store) -> None:
        before = source.state(), target.state()
        shared = sum(len(source.held(s)) for s in seq_ids)
        try:
            copies = source.manager.move_to(target.manager, seq_ids)
        except OutOfBlocks as error:
            assert error.needed > error.available == target.manager.allocator.num_available
            assert (source.state(), target.state()) == before
            return
        assert len({copy.src for copy in copies}) == len(copies) <= shared, "a shared block is copied once"
        target.copy(copies, source)
        for seq_id in seq_ids:
            target.readable_from[seq_id] = source.readable_from[seq_id]
            target.seqs[seq_id] = self.forget(source, seq_id)

    @precondition(has_seqs)
    @rule(first=PICK, count=st.integers(1, 3))
    def swap_out(self, first: int, count: int) -> None:
        seqs = list(self.device.seqs)
        start = first % len(seqs)
        self.move(seqs[start : start + count], self.device, self.host)

    @precondition(has_swapped)
    @rule(first=PICK, count=st.integers(1, 3))
    def swap_in(self, first: int, count: int) -> None:
        seqs = list(self.host.seqs)
        start = first % len(seqs)
        self.move(seqs[start : start + count], self.host, self.device)

    @rule(more=st.integers(0, 2))
    def grow(self, more: int) -> None:
        allocator = self.device.manager.allocator
        if allocator.num_blocks < 20:
            allocator.grow(allocator.num_blocks + more)

    @precondition(has_seqs)
    @rule()
    def step_done(self) -> None:
        """Blocks outside the window are freed; those that the next token attends to are kept."""
        for seq_id in self.device.seqs:
            self.drop(seq_id)

    def drop(self, seq_id: int) -> None:
        manager = self.device.manager
        dropped, length = manager.drop_unseen(seq_id), len(self.device.seqs[seq_id])
        assert manager.drops_blocks or not dropped
        readable = self.device.readable_from[seq_id]
        for number, (group, table) in enumerate(zip(manager.groups, manager.block_tables(seq_id))):
            if group.kind != FULL:
                readable[number] = max(readable[number], group.kind.first_visible(length))
                alive = [b for b in table if b != NULL_BLOCK]
                assert len(alive) <= group.kind.most_blocks(length, manager.block_size)

    @precondition(lambda self: self.device.manager.drops_blocks and bool(self.device.seqs))
    @rule(number=PICK, count=st.integers(1, 12))
    def decode_long(self, number: int, count: int) -> None:
        """The memory of a windowed sequence is bounded for any length."""
        seq_id = self.pick(number)
        for _ in range(count):
            self.append_to([(seq_id, [0])])
            self.drop(seq_id)

    # -- the prefix cache ---------------------------------------------------------------------------------------

    @property
    def num_pins(self) -> int:
        return 0 if self.cache is None else len(self.cache.pins)

    def register(self, seq_id: int) -> None:
        if self.cache is None:
            return
        tokens, digests = self.device.seqs[seq_id], []
        self.cache.extend_digests(digests, tokens, ROOT, len(tokens) // self.cache.block_size)
        for index, digest in enumerate(digests):
            self.cache.register(self.device.manager.block_tables(seq_id), index, digest)

    def longest_hit(self, tokens: list[int]) -> int:
        """Blocks of the longest prefix whose blocks are all there that a next token reads, by trying every length."""
        assert self.cache is not None
        size, digests = self.cache.block_size, []
        self.cache.extend_digests(digests, tokens, ROOT, max(len(tokens) - 1, 0) // size)
        found = 0
        for count in range(1, len(digests) + 1):
            needed = [
                (group, digests[index])
                for group, each in enumerate(self.device.manager.groups)
                for index in range(count)
                if (index + 1) * size > each.kind.first_visible(count * size)
            ]
            if all(digest in self.cache._blocks[group] for group, digest in needed):
                found = count
        return found

    @precondition(has_cache)
    @rule(tokens=st.lists(TOKENS, max_size=12))
    def adopt(self, tokens: list[int]) -> None:
        """A new request whose prefix is cached reads what other sequences wrote."""
        self.preempted.append(tokens)
        self.resume(len(self.preempted) - 1)

    @precondition(has_cache)
    @rule(tokens=st.lists(TOKENS, max_size=8), pin=st.booleans())
    def pin(self, tokens: list[int], pin: bool) -> None:
        assert self.cache is not None
        if pin:
            held = self.cache.pin(tokens, ROOT)
            assert held <= len(tokens)
            assert self.cache.match([*tokens, 0], ROOT).num_blocks * self.device.manager.block_size == held
        else:
            self.cache.unpin(tokens, ROOT)

    @precondition(has_cache)
    @rule()
    def clear(self) -> None:
        assert self.cache is not None
        self.cache.clear()
        assert len(self.cache) == self.device.manager.allocator.num_cached == self.num_pins == 0

    # -- always -------------------------------------------------------------------------------------------------

    @invariant()
    def tables_are_right(self) -> None:
        if not hasattr(self, "device"):
            return
        self.device.check(self.num_pins)
        self.host.check()
        if self.cache is not None:
            self.cache.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        if self.cache is not None:
            self.cache.clear()
        for store in (self.device, self.host):
            for seq_id in store.manager.seq_ids:
                store.manager.free(seq_id)
            assert store.manager.allocator.num_free == store.manager.allocator.num_blocks


class GroupsMachine(BlockMachine):
    windows = (None, 3, 3)


class WindowPrefixMachine(BlockMachine):
    windows = (6,)
    caching = True


class GroupsPrefixMachine(BlockMachine):
    windows = (None, 6, 6, 3)
    caching = True


MACHINE_SETTINGS = settings(
    max_examples=35, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

TestBlocks = BlockMachine.TestCase
TestGroups = GroupsMachine.TestCase
TestWindowPrefix = WindowPrefixMachine.TestCase
TestGroupsPrefix = GroupsPrefixMachine.TestCase
for case in (TestBlocks, TestGroups, TestWindowPrefix, TestGroupsPrefix):
    case.settings = MACHINE_SETTINGS
del case  # pytest would run it once more
