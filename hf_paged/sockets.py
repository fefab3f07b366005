"""The sockets of an engine: read this first. What may be plugged into the core, and when the core calls it.

A way to compute a model is an `Executor`. A feature that needs more than block tables is a `SideMemory`, an order of
requests a `Policy`, what a request wants of the model's output a `Task`. The core knows these classes alone: a tenant
of a socket changes no line of it. All methods are called by the thread that runs a step or a change between two steps.
Those of a SideMemory that the scheduler calls, and those of a Policy, may not raise: that breaks off the step.

A `Group` is a request as the scheduler sees it (`hf_paged.generation.requests.sequence.SequenceGroup`) with its
`request_id`, `priority`, `arrival`, `width` (sequences that it may have) and `live` (those that it has). An `Output` is
one step as data (`hf_paged.generation.engine.tables.SchedulerOutput`). Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Group = Any
Output = Any
Plan = Any
Tensor = Any


@dataclass(slots=True)
class Parts:
    """The next tokens of sequences, which an `Executor` computes in one run: parallel lists, a part for each sequence.

    seq_ids: the sequences. starts: how many tokens of each are computed. tokens: the next ones of all, one part after
    the other; all have slots. counts: how many each has; None: one each, after which its next is due. whole: how many
    each computes at once where results depend on that (`SequenceGroup.whole`). wanted: the places in `tokens` after
    which logits are wanted, in the order of the results; None: all. hidden: the places whose hidden states are wanted:
    the run puts them into `hidden_rows` [num_hidden, size], in this order. late: a tensor with tokens that the host
    does not know, and where they belong, as pairs (place in `tokens`, its index there); None: all, in their order.
    adapters: a description of those that are switched on. extra: what side memories have added, by name. packed: what
    the executor has made of all this, if it has.
    """

    seq_ids: list[int]
    starts: list[int]
    tokens: list[int]
    counts: list[int] | None = None
    whole: list[int] = field(default_factory=list)
    wanted: list[int] | None = None
    hidden: list[int] = field(default_factory=list)
    hidden_rows: Tensor | None = None
    late: tuple[Tensor, list[tuple[int, int]] | None] | None = None
    adapters: bytes | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    packed: Any = None


Results = tuple[Tensor | None, Mapping[int, Exception]]
"""Logits [num_wanted, vocab] (None: there are none) without those of parts that failed, and the errors of these by the
index of the part. (`Parts.hidden_rows` is without them too.) What a run raises concerns all of its parts."""


class Executor:
    """A way to compute a model: its `model` bound to a `memory` of K/V in blocks, whose tables the caller keeps.

    `PackedModel` computes all parts of a run as one row of tokens, `RowModel` as rows of batches, and `EncoderRows`
    does so beside the K/V of encoders' states. `weights` looks for changes of the model.

    What it can do, as data. is_packed: all parts are one row of tokens, of which the device alone may know some, so
    that steps can be launched ahead. viewed_tokens: those whose K/V of one layer a run gathers beside the blocks.
    max_length: longer sequences would depend on others of the run (None: none does). no_prefixes: why a sequence cannot
    begin with what another one has computed ("": it can). no_hidden: why no run has hidden states of tokens ("": it may
    have). has_states: it keeps a state of each sequence beside K/V, of
    `state_bytes` on each device, of which the largest tensor has `tensor_bytes`, and which a token makes larger by
    `state_bytes_per_token`.

    What the engine sets. is_fixed: it looks at the weights before each run. one_order: the context in which sums have
    one order, whatever else is in a run (None: they have not). graphs: computes the runs that were captured. stand_in:
    `stand_in(self, reason)` makes what takes its place while third-party code is in the model, if it needs that.
    """

    model: Any
    memory: Any
    weights: Any
    is_packed = False
    viewed_tokens = 0
    max_length: int | None = None
    no_prefixes = ""
    no_hidden = ""
    has_states = False
    state_bytes: Mapping[Any, int] = {}
    tensor_bytes: Mapping[Any, int] = {}
    state_bytes_per_token: Mapping[Any, int] = {}
    is_fixed = False
    one_order: Any = None
    graphs: Any = None
    stand_in: Callable[[Any, str], Executor]

    @property
    def verifies(self) -> bool:
        """Return True if a run computes several tokens of a sequence at once, as verifying drafts needs."""
        return False

    @property
    def splits_prompts(self) -> bool:
        """Return True if results do not depend on how prompts are cut. Else parts have `Parts.whole` tokens at once."""
        return True

    @property
    def order_obstacle(self) -> str:
        """The reason why sums cannot have one order; "": they may."""
        return ""

    @property
    def chunk(self) -> int | None:
        """Tokens of a prompt in a run, at most, so that those of several share forwards."""
        return None

    def beside(self, reason: str | None) -> Executor:
        """Return what computes the model from now on. reason: what third-party code is in it (None: there is none)."""
        return self

    def follow_structure(self) -> None:
        """The model has other modules, whose K/V fits the memory."""

    def measure(self, tried: Any, num_tokens: int) -> None:
        """Compute so many tokens or fewer, so that every layer allocates its K/V. tried: the model, or what does so in
        its place."""

    # -- a run, and what follows the tables ---------------------------------------------------------------------

    def pack(self, parts: Parts) -> Any:
        """Return what `run` makes of these first (`Parts.packed`), without computing anything."""

    def run(self, parts: Parts) -> Results:
        """Compute these parts. Their K/V is in the blocks afterwards."""
        raise NotImplementedError

    def fork(self, parent_id: int, child_id: int) -> None:
        """A sequence has the tokens of another one from now on."""

    def free(self, seq_id: int) -> None:
        """The sequence has ended, or begins again."""

    def suspend(self, seq_id: int, num_tokens: int) -> None:
        """The sequence, of which so many tokens are computed, is swapped out. The next run with it takes it back."""

    # -- its memory ---------------------------------------------------------------------------------------------

    def drop_overrides(self) -> None:
        """Let packed weights go."""

    def close(self) -> None:
        """Drop what is kept of sequences. The device has finished."""


class Policy:
    """The order of requests, of one engine: `SchedulerConfig(policy=...)`. This one is "fcfs"; another is

        class FairShare(Policy):
            is_static = False

            def __init__(self, client_of):
                self.client_of, self.served = client_of, Counter()

            def key(self, group):
                return self.served[self.client_of(group.request_id)]

            def on_served(self, group, num_tokens):
                self.served[self.client_of(group.request_id)] += num_tokens

    Whatever it says, running groups keep their order (that of their keys if those are static, else that in which they
    began), and none is preempted for one behind it. So the first always makes progress.
    """

    is_static = True
    """Keys never change, so that groups are sorted as they come. False: those that wait are sorted before each step."""

    def key(self, group: Group) -> Any:
        """Smaller keys go first, equal ones in the order in which they came."""
        return group.priority, group.arrival

    def victim(self, candidates: Sequence[Group]) -> Group:
        """Choose the group to preempt, because blocks have run out. candidates: running groups, in order."""
        return candidates[-1]

    def on_served(self, group: Group, num_tokens: int) -> None:
        """A step has computed so many tokens of the group, those of its prompt and of drafts included."""


class Task:
    """A wish of a request: rows of the model's output at positions of its prompt. `add_request(..., task=...)` takes an
    object for each request. This one wants nothing; another is

        class LastHidden(Task):
            keeps, generates = "hidden", False

            def begin(self, prompt):
                self.start, self.stop = len(prompt) - 1, len(prompt)

            def consume(self, first, rows):
                self.state = rows[-1].float().cpu()

            def fill(self, output):
                output.result = self.state

    It gets each position once, in order, over as many steps as the prompt takes: if the prompt is computed again, what
    it has got is left out. What it raises ends its request alone.
    """

    keeps: Literal["logits", "hidden"] = "logits"
    """The rows: logits [num_rows, vocab], or hidden states [num_rows, size], which the base model gives its head."""

    generates = True
    """Tokens follow the prompt. False: the request ends when it has its rows; of its config nothing counts."""

    start = 0
    """The first position that is still wanted. It is computed, and not taken from cached prefixes. The engine sets it
    to the one after those that were consumed."""

    stop = 0
    """The position after the last one that is wanted."""

    def begin(self, prompt: Sequence[int]) -> None:
        """A request with this prompt is made, in any thread: set `start` and `stop`. A ValueError refuses it."""

    def wanted(self, first: int, end: int) -> range:
        """Return the wanted positions of those from `first` to `end`, which a step computes."""
        return range(max(first, self.start), min(end, self.stop))

    def consume(self, first: int, rows: Tensor) -> None:
        """Take the rows after the tokens at positions `first`, `first` + 1 and so on, on their device. Copy what you
        keep: the next step may use their memory."""

    def fill(self, output: Any) -> None:
        """Enter the result, as far as there is one, in a new output of the request: a `RequestOutput`, which has the
        attribute `result`."""


class SideMemory:
    """Memory that groups need besides their block tables; `executors.side_memories` lists those of an engine. By
    default the methods do nothing. A quota, for example:

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
    """

    goes_back = False
    """A wrong draft takes a sequence back to before the step, because what it has of a step is whole or nothing."""

    stops_prompts = False
    """Prompts end steps early, so that blocks for their ends are left over when others start."""

    def bind(self, schedule: Any) -> None:
        """The scheduler gets tables, or others, and no group holds blocks. `schedule` is the scheduler, to be read:
        `manager` and `host_manager` (block tables), `prefix_cache`, `waiting`, `running`, `swapped`, `next_in_line()`.
        """

    # -- a group starts, and stops ------------------------------------------------------------------------------

    def is_ready(self, group: Group) -> bool:
        """Return True if a group may start. Those behind it wait too, so it must become ready while others end."""
        return True

    def blocks_needed(self, group: Group) -> int:
        """Blocks that `take` will use for a group that is ready."""
        return 0

    def blocks_beside(self, num_seqs: int) -> int:
        """Blocks whose memory so many sequences of a group take, on the device or, swapped out, on the host."""
        return 0

    def take(self, group: Group) -> None:
        """A group begins to run. Its first sequence has a table, with what was found in the prefix cache."""

    def give_up(self, group: Group, *, restarts: bool) -> None:
        """A group runs no more, or ends before. restarts: it waits, to compute all of its tokens again."""

    def ended(self, seq: Any, *, is_lost: bool) -> None:
        """A sequence ends. is_lost: as a beam that goes nowhere."""

    # -- a step -------------------------------------------------------------------------------------------------

    def hold(self, num_drafts: int) -> bool:
        """The next step computes so many sequences with drafts: take memory for them instead of what was held. False:
        there is not so much, and nothing has changed. A step begins with 0, which is granted."""
        return True

    def verified(self, seq: Any) -> None:
        """The draft of one of these is done with."""

    def settle(self) -> None:
        """Other groups run, or have other memory: adapt what is withheld from the allocator."""

    def fill(self, output: Output) -> None:
        """The step is decided: enter what it is to do for this memory."""

    def computed(self, output: Output) -> None:
        """The step is computed; its tokens are not yet counted in `num_computed_tokens`."""

    # -- memory that can be given up, and interrupts ------------------------------------------------------------

    def num_idle_blocks(self, but: Group | None) -> int:
        """Blocks that `evict` can free."""
        return 0

    def evict(self, but: Group | None) -> bool:
        """Free some blocks that no running group uses, nor `but`, which may start. False: there are none."""
        return False

    def forget(self) -> None:
        """The weights have changed: no later group may use what was computed."""

    @property
    def table_ids(self) -> Collection[Hashable]:
        """Ids of its own tables in the block manager."""
        return ()

    def recover(self) -> None:
        """A step was broken off, and no group runs: keep what is whole."""

    def check_integrity(self) -> None:
        """Raises AssertionError if something does not fit together (between two steps)."""

    # -- on the device: the scheduler knows nothing of what follows ---------------------------------------------

    def use(self, executor: Executor) -> None:
        """The memory is that of this executor from now on."""

    num_computed = 0
    """Inputs that were computed for groups before they could start, so far."""

    num_hits = 0
    """Inputs that were there already when a group needed them, so far."""

    def unready(self) -> list[Group]:
        """Groups that may start in the next step if what they need is computed before it."""
        return []

    def compute(
        self, groups: list[Group], run: Callable[[Any, Callable[[], Any]], Any]
    ) -> list[tuple[Group, Exception]]:
        """Compute what these groups need. Returns those that failed; others start then, or are unready again. `run(its
        adapters, call)` returns what a call returns while these adapters are switched on."""
        return []

    def move(self, output: Output) -> None:
        """Before the blocks of a step are moved: do what the step says on the device."""

    def can_move_again(self, output: Output) -> bool:
        """Return True if an interrupted `move` has lost nothing and can run again."""
        return True

    def apart(self, plan: Plan, executor: Executor) -> list[Plan]:
        """Return those of a plan that share no run with others, as plans. What fails there ends only its sequences."""
        return []

    def extend(self, parts: Parts, plan: Plan, output: Output) -> None:
        """Add to these parts of a step, which are those of a plan, what the executor needs besides tokens."""

    def take_back(self, seq: Any, num_tokens: int, *, is_right: bool) -> bool:
        """After a step with a draft of `seq`: whether it has again what it had after `num_tokens` tokens, before the
        step, because the draft was not right."""
        return False

    def lost(self, groups: Iterable[Group]) -> list[Group]:
        """After an interrupted run: those of the running groups that it has left without what they had."""
        return []

    def close(self) -> None:
        """Free the memory. The device has finished."""
