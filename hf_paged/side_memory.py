"""SideMemory: what requests need besides tokens and block tables. See `sockets.py`. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_paged.executor import Executor, Parts, Tensor

Group = Any
Output = Any
Plan = Any


class Attachment:
    """A part of a request besides tokens, which a side memory has put there. This class changes nothing.

    Attributes:
        reads_prompt: True if it belongs to tokens of the prompt: no step computes these and later ones, and some of
            them may have to be computed together.
    """

    __slots__ = ()
    reads_prompt = False

    def root(self, root: bytes) -> bytes:
        """Return the digest under which prefixes are cached that depend on this too. root: that of tokens alone."""
        return root

    def keyed(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the numbers by which prefixes are found, one for each token: another where the token shows something
        else."""
        return token_ids

    def undivided(self, start: int, count: int) -> int:
        """Return how many tokens a step may compute without cutting a run of tokens that must be computed together."""
        return count


@dataclass(slots=True)
class Inputs:
    """The inputs of a request while it is made. Side memories read them in turn, and enter their parts.

    Attributes:
        prompt: The prompt as the caller gave it.
        options: The options of the request (`RequestOptions`).
        others: The caller's `inputs` by name. Who takes one removes it; what is left is refused.
        ids: `ids(prompt, attention_mask)` returns token ids without padding.
        run: `run(call)` returns what `call()` does while the model computes as for this request.
        read: The prompt's token ids, or tensors of one row by name, of which transformers makes them. None = nobody
            has read it yet.
        beside: Attachments of the request by name.
        methods: Functions by name, in the place of the model's while transformers prepares the request.
    """

    prompt: Any
    options: Any
    others: dict[str, Any]
    ids: Callable[[Any, Any], list[int]]
    run: Callable[[Callable[[], Any]], Any]
    read: list[int] | Mapping[str, Tensor] | None = None
    beside: dict[str, Attachment] = field(default_factory=dict)
    methods: dict[str, Callable[..., Any]] = field(default_factory=dict)


class SideMemory:
    """Memory that groups need besides their block tables. By default the methods do nothing.

    `SIDE_MEMORIES` of `features/executors.py` has a line for each kind.

    Attributes:
        goes_back: True if a wrong draft takes a sequence back to before the step, because it keeps all of a step or
            nothing.
        stops_prompts: True if prompts may stop before the end of a step. Their remaining blocks must then be left over
            when others start.
        stays: True if it belongs to further executors of the same engine too. Otherwise each has a new one.
        num_computed: Counter of inputs that were computed for groups before they could start.
        num_hits: Counter of inputs that were there already when a group needed them.

    Example:
        A limit on how many groups run at once.

        ```python
        from hf_paged.sockets import SideMemory


        class Licences(SideMemory):
            def __init__(self, count):
                self.count, self.holders = count, set()

            def is_ready(self, group):
                return len(self.holders) < self.count

            def take(self, group):
                self.holders.add(group)

            def give_up(self, group, *, restarts):
                self.holders.discard(group)

            def recover(self):
                self.holders.clear()


        licences = Licences(count=1)
        licences.take("first group")
        assert not licences.is_ready("second group")
        ```
    """

    goes_back = False
    stops_prompts = False
    stays = False
    num_computed = 0
    num_hits = 0

    def bind(self, schedule: Any) -> None:
        """Take note of the scheduler when it gets block tables, for the first time or again. No group holds blocks.
        schedule: the scheduler, to be read: `manager` and `host_manager` (block tables), `prefix_cache`, `waiting`,
        `running`, `swapped`, `next_in_line()`."""

    def read(self, inputs: Inputs) -> None:
        """Enter this memory's part of a request, in any thread."""

    # -- a group starts, and stops ------------------------------------------------------------------------------

    def is_ready(self, group: Group) -> bool:
        """Return True if a group may start. Those behind it wait too, so it must become ready while others end."""
        return True

    def blocks_needed(self, group: Group) -> int:
        """Return how many blocks `take` will use."""
        return 0

    def blocks_beside(self, num_seqs: int) -> int:
        """Return how many blocks' memory the sequences of a group take besides their tables. num_seqs: sequences of the
        group, which is on the device or swapped out to the host."""
        return 0

    @property
    def unlisted_blocks(self) -> tuple[int, int]:
        """Blocks that running groups use, and idle ones, which the figures of block tables lack. Of a table that no
        running group uses, which they count as used, the first number is negative."""
        return 0, 0

    def take(self, group: Group) -> None:
        """Take memory for a group that begins to run. Its first sequence has a table, with what was found in the prefix
        cache."""

    def give_up(self, group: Group, *, restarts: bool) -> None:
        """Free the memory of a group that runs no more, or that ends before it ran. restarts: it waits, to
        compute all of its tokens again."""

    def ended(self, seq: Any, *, is_lost: bool) -> None:
        """Take note that a sequence has ended. is_lost: it is a beam that no beam continues."""

    # -- prefixes, of models without recurrent states -----------------------------------------------------------

    def evicted(self, block_id: int, group: int, digest: bytes) -> None:
        """Take note that the prefix cache has evicted a block. Until the end of the next `move` it has its K/V. group:
        number of the layers' group that it is of. digest: of the prefix that it ends, the same for each group."""

    def num_kept(self, digests: Sequence[bytes]) -> int:
        """Return with how many of the first blocks of this chain `recall` may be called: those of every group that a
        next token attends to are kept. Asked only if the class has an `evicted` of its own."""
        return 0

    def recall(self, blocks: Sequence[tuple[Any, ...]]) -> None:
        """Fill blocks in the next `move`, after it has read evicted ones, which may be the same. blocks: a digest, and
        a block id for each group, for each block of the chain."""

    # -- a step -------------------------------------------------------------------------------------------------

    def hold(self, num_drafts: int) -> bool:
        """Take memory for the drafts of so many sequences in the next step, instead of what was held before. Returns
        False if there is too little, and nothing has changed. A step begins with 0, which must be granted."""
        return True

    def verified(self, seq: Any) -> None:
        """Take note that the draft of a sequence is verified."""

    def settle(self) -> None:
        """Adapt what is withheld from the allocator, because other groups run or have other memory."""

    def fill(self, output: Output) -> None:
        """Enter what a step has to do for this memory, as `output.moves[self]`."""

    def computed(self, output: Output) -> None:
        """Take note that a step is computed. Its tokens are not yet counted in `num_computed_tokens`."""

    # -- memory that can be given up, and interrupts ------------------------------------------------------------

    def num_idle_blocks(self, but: Group | None) -> int:
        """Return how many blocks `evict` can free. but: a group that may start, whose memory is not idle."""
        return 0

    def evict(self, but: Group | None) -> bool:
        """Free some blocks that neither a running group uses nor `but`, which may start. False: there are none."""
        return False

    def forget(self) -> None:
        """Keep later groups from what former weights have computed."""

    @property
    def table_ids(self) -> Collection[Hashable]:
        """Ids of this memory's own tables in the block manager."""
        return ()

    def recover(self) -> None:
        """Keep what is whole after a step was broken off. No group runs."""

    def check_integrity(self) -> None:
        """Raises AssertionError if something does not fit together, between two steps."""

    # -- on the device: the scheduler knows nothing of what follows ---------------------------------------------

    def use(self, executor: Executor) -> None:
        """Belong to another executor from now on."""

    def unready(self) -> list[Group]:
        """Return groups that may start in the next step, if what they need is computed before it."""
        return []

    def compute(
        self, groups: list[Group], run: Callable[[Any, Callable[[], Any]], Any]
    ) -> list[tuple[Group, Exception]]:
        """Compute what these groups need before they can start. `run(variant, call)` returns what `call()` returns
        while a group's variant of the model is switched on. Returns failed groups with their errors. The others may
        start now, or are unready again."""
        return []

    def move(self, output: Output) -> None:
        """Do on the device what a step says, before its blocks are moved."""

    def can_move_again(self, output: Output) -> bool:
        """Return True if an interrupted `move` has lost nothing and can run again."""
        return True

    def apart(self, plan: Plan, executor: Executor) -> list[Plan]:
        """Choose the sequences of a plan that share no run with the others. A failure there ends only these. plan: of
        the sequences with one variant of the model."""
        return []

    def extend(self, parts: Parts, plan: Plan, output: Output) -> None:
        """Add to parts what the executor needs besides tokens."""

    def take_back(self, seq: Any, num_tokens: int, *, is_right: bool) -> bool:
        """Take a sequence back to before a step, if its draft was wrong. num_tokens: tokens that it had before the
        step. is_right: True if all of the draft was right. Returns True if the sequence has again what it had before.
        """
        return False

    def lost(self, groups: Iterable[Group]) -> list[Group]:
        """Return the groups that an interrupted run has left without what they had."""
        return []

    def close(self) -> None:
        """Free the memory. The device has finished."""
