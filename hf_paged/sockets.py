"""The sockets of an engine: what may be plugged into the core, and when the core calls it. Read this first.

A way to compute a model is an `Executor`. A feature that needs more than block tables is a `SideMemory`. An order of
requests is a `Policy`. What a request wants of the model's output is a `Task`. The core knows only these classes, so a
new subclass changes no line of it. The thread that runs a step, or makes a change between two steps, calls all methods.
The methods of a Policy, and those of a SideMemory that the scheduler calls, must not raise, because an error would
break off the step.

A `Group` is a request as the scheduler sees it (`hf_paged.generation.requests.sequence.SequenceGroup`), with its
`request_id`, `client`, `priority`, `arrival`, `live` (its sequences) and `width` (how many it may have). A `Plan` is a
list of (sequence, number of tokens). An `Output` is one step as data
(`hf_paged.generation.engine.tables.SchedulerOutput`). Standard library only.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Group = Any
Output = Any
Plan = Any
Tensor = Any


@dataclass(slots=True)
class Parts:
    """The next tokens of some sequences, which an `Executor` computes in one run.

    The lists are parallel: a part for each sequence.

    Attributes:
        seq_ids: Ids of the sequences.
        starts: Number of tokens of each sequence that are computed already.
        tokens: The next tokens, one part after the other. All of them have slots.
        counts: Number of tokens in each part. None = one each, after which the next token is due.
        whole: Number of tokens that each sequence must compute at once, where results depend on that
            (`SequenceGroup.whole`).
        wanted: Places in `tokens` after which logits are wanted, in the order of the results. None = all.
        hidden: Places in `tokens` whose hidden states are wanted.
        hidden_rows: Set by the run: these states [num_hidden, size], in this order, without those of failed parts.
            None = there are none.
        late: An int tensor of tokens that the host does not know yet, and their places as pairs (place in `tokens`,
            index in the tensor). None in place of the pairs = all tokens, in order.
        adapters: A description of the adapters that are switched on.
        extra: What side memories have added, by name.
        packed: What `Executor.pack` has made of these parts. None = nothing yet.

    Example:
        ```python
        from hf_paged.sockets import Parts

        prompt_and_decode = Parts(seq_ids=[0, 1], starts=[0, 8], tokens=[5, 6, 7, 9], counts=[3, 1], wanted=[2, 3])
        ```
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

    @property
    def lengths(self) -> list[int]:
        """Return how many tokens each part has."""
        return self.counts or [1] * len(self.seq_ids)


Results = tuple[Tensor | None, Mapping[int, Exception]]
"""The results of a run: logits [num_wanted, vocab], or None for no logits, and the errors of failed parts by index. The
logits leave out failed parts. If the run itself raises, all of its parts have failed."""


class Executor:
    """A way to compute a model: its `model`, bound to a `memory` of K/V in blocks, whose tables the caller keeps.

    `PackedModel` computes all parts of a run as one row of tokens, and `RowModel` as rows of batches. `EncoderRows`
    does the latter beside the K/V of encoders' states.

    Attributes:
        model: The transformers model.
        memory: A `PagedMemory`.
        weights: Notices changes of the model (`hf_paged.model.weights.Weights`).
        is_packed: True if all parts are one row of tokens. The device alone may then know some of the tokens, so that
            steps can be launched ahead.
        viewed_tokens: Number of tokens whose K/V, of one layer, a run gathers outside of the blocks.
        max_length: Limit of a sequence, in tokens. Longer sequences would depend on others in the run. None = no limit.
        no_prefixes: Why a sequence cannot begin with what another one has computed. "" = it can.
        no_hidden: Why no run sets `Parts.hidden_rows`. "" = a run sets them, which an executor must say itself.
        has_states: True if each sequence has a state besides K/V.
        state_bytes: Bytes of a sequence's state on each device.
        tensor_bytes: Bytes of the largest tensor of that state.
        state_bytes_per_token: Bytes by which each token makes the state larger.
        is_fixed: Set by who looks at the weights before each run, such as the engine.
        one_order: Set by the engine: the context in which sums have one order, whatever else is in a run. None = no
            fixed order.
        graphs: Set by the engine: computes the runs that were captured.
        stand_in: Set by the engine: `stand_in(self, reason)` makes the executor for as long as third-party code is in
            the model.

    Example:
        ```python
        from transformers import AutoModelForCausalLM
        from hf_paged.cache.memory import PagedMemory
        from hf_paged.model.packed import PackedModel
        from hf_paged.sockets import Parts

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        executor = PackedModel(model, PagedMemory(block_size=16, growable=True))
        executor.memory.append([(0, 3)])  # slots for three tokens of sequence 0
        logits, failed = executor.run(Parts([0], [0], [1, 5, 6], counts=[3], wanted=[2]))
        assert len(logits) == 1 and not failed
        ```
    """

    model: Any
    memory: Any
    weights: Any
    is_packed = False
    viewed_tokens = 0
    max_length: int | None = None
    no_prefixes = ""
    no_hidden = "the executor takes none from its runs"
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
        """True if a run computes several tokens of a sequence at once, as verifying drafts needs."""
        return False

    @property
    def splits_prompts(self) -> bool:
        """True if results do not depend on how prompts are cut. Otherwise parts have `Parts.whole` tokens at once."""
        return True

    @property
    def order_obstacle(self) -> str:
        """The reason why sums cannot have one order; "" if they can."""
        return ""

    @property
    def chunk(self) -> int | None:
        """The most tokens of one prompt in a run, so that several prompts share forwards; None: no limit."""
        return None

    def beside(self, reason: str | None) -> Executor:
        """Return the executor that computes the model from now on.

        Args:
            reason: The third-party code that is in the model. None = there is none.

        Returns:
            This executor, or another one over the same memory.
        """
        return self

    def follow_structure(self) -> None:
        """Follow replaced modules of the model, whose K/V fits the memory."""

    def measure(self, tried: Any, num_tokens: int) -> None:
        """Compute some tokens, so that every layer allocates its K/V.

        Args:
            tried: The model, or a copy of it that computes instead.
            num_tokens: The most tokens to compute.
        """

    # -- a run, and what follows the tables ---------------------------------------------------------------------

    def pack(self, parts: Parts) -> Any:
        """Do the first part of `run`, without computing anything.

        Args:
            parts: The parts of the run.

        Returns:
            What `run` needs; it is also kept in `parts.packed`.
        """

    def run(self, parts: Parts) -> Results:
        """Compute these parts, and write their K/V to the blocks.

        Args:
            parts: The parts of the run. Their tokens have slots.

        Returns:
            Logits [num_wanted, vocab] and the errors of failed parts (see `Results`).

        Raises:
            NotImplementedError: In this class only.
        """
        raise NotImplementedError

    def fork(self, parent_id: int, child_id: int) -> None:
        """Give a new sequence what is kept of another one.

        Args:
            parent_id: The other sequence.
            child_id: The new sequence.
        """

    def free(self, seq_id: int) -> None:
        """Drop what is kept of a sequence, because it has ended or begins again.

        Args:
            seq_id: The sequence.
        """

    def give_states(self, seq_ids: Sequence[int], cache: Any) -> None:
        """Give a cache of transformers what is kept of the sequences that are its rows from now on.

        Args:
            seq_ids: The sequences.
            cache: The cache, which has their blocks.
        """

    def suspend(self, seq_id: int, num_tokens: int) -> None:
        """Put aside what is kept of a sequence that is swapped out. The next run with it takes it back.

        Args:
            seq_id: The sequence.
            num_tokens: How many of its tokens are computed.
        """

    # -- its memory ---------------------------------------------------------------------------------------------

    def drop_overrides(self) -> None:
        """Free packed weights."""

    def close(self) -> None:
        """Drop what is kept of all sequences. The device has finished."""


class Policy:
    """The order of requests in one engine: `SchedulerConfig(policy=...)`. This class is "fcfs".

    Whatever a policy says, running groups keep their order: that of their keys if these are static, else that in which
    they began. No group is preempted for one behind it, so the first always makes progress (PagedAttention, section
    4.5).

    Attributes:
        is_static: True if keys never change, so that a group is sorted once, when it comes. False = waiting groups are
            sorted before each step.

    Example:
        ```python
        from collections import Counter
        from hf_paged import SchedulerConfig
        from hf_paged.sockets import Policy


        class FairShare(Policy):
            is_static = False

            def __init__(self, client_of):
                self.client_of, self.served = client_of, Counter()

            def key(self, group):
                return self.served[self.client_of(group.request_id)]

            def on_served(self, group, num_tokens):
                self.served[self.client_of(group.request_id)] += num_tokens


        config = SchedulerConfig(policy=FairShare(lambda request_id: request_id.split("/")[0]))
        ```
    """

    is_static = True

    def key(self, group: Group) -> Any:
        """Return the sorting key of a group.

        Args:
            group: A waiting group.

        Returns:
            Anything that can be compared. Smaller keys go first, and equal ones in the order of arrival.
        """
        return group.priority, group.arrival

    def victim(self, candidates: Sequence[Group]) -> Group:
        """Choose the group to preempt, because blocks have run out.

        Args:
            candidates: Running groups, in order.

        Returns:
            One of the candidates.
        """
        return candidates[-1]

    def shares(self, running: Sequence[Group], starting: Sequence[Group], budget: int) -> Mapping[Group, int] | None:
        """Say how many tokens of a step each group may have, at most.

        Without shares, a prompt that runs takes what is left of each step until it is computed. A group whose share is
        0 waits for another step. Whatever the shares, the first running group makes progress, and a group with images,
        videos or audio takes what it needs.

        Args:
            running: Running groups, in order. What each lacks is the sum of `num_uncomputed_tokens` of its `live`.
            starting: Waiting groups for which there is room, in order.
            budget: The most tokens of the step.

        Returns:
            The most tokens of groups. Those that it does not have, and all if it is None, take what is left, in order.
        """
        return None

    def on_served(self, group: Group, num_tokens: int) -> None:
        """Take note that a step has computed tokens of a group.

        Args:
            group: The group.
            num_tokens: How many tokens, including those of its prompt and of drafts.
        """


POLICIES = {"fcfs": "hf_paged.sockets:Policy", "fair": "hf_paged.policies:Fair"}
"""Policies by name: the place of a class that is made without arguments. It is imported when it is chosen."""


def policy_of(given: Policy | str) -> Policy:
    """Return the policy of this name, a new one, or `given` if it is a policy."""
    if isinstance(given, Policy):
        return given
    made: Policy = pkgutil.resolve_name(POLICIES[given])()
    return made


class Task:
    """A wish of a request: rows of the model's output at positions of its prompt, in place of new tokens or with them.

    `Engine.add_request(task=...)` takes an object for each request. It gets each position once, in order, over as many
    steps as the prompt takes. If the prompt is computed again, what it has got is left out. What its
    methods raise ends its request alone. This class wants nothing.

    Attributes:
        keeps: "logits" = rows [num_rows, vocab]. "hidden" = rows [num_rows, size], which the base model gives its head.
        generates: True if tokens follow the prompt. False = the request ends when it has its rows, and nothing of its
            config counts.
        start: The first position that is still wanted. It is computed, and not taken from cached prefixes. The engine
            sets it to the one after those that were consumed.
        stop: The position after the last one that is wanted.

    Example:
        ```python
        from hf_paged.sockets import Task


        class LastHidden(Task):
            keeps, generates = "hidden", False

            def begin(self, prompt):
                self.start, self.stop, self.state = len(prompt) - 1, len(prompt), None

            def consume(self, first, rows):
                self.state = rows[-1].float().cpu()

            def fill(self, output):
                output.result = self.state


        task = LastHidden()
        task.begin([5, 6, 7])
        assert list(task.wanted(0, 3)) == [2]
        ```
    """

    keeps: Literal["logits", "hidden"] = "logits"
    generates = True
    start = 0
    stop = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Set `start` and `stop`, when a request is made, in any thread.

        Args:
            prompt: Token ids of the request.
        """

    def wanted(self, first: int, end: int) -> range:
        """Return the wanted positions of those that a step computes.

        Args:
            first: The first position that the step computes.
            end: The position after the last one.

        Returns:
            Positions without a gap.
        """
        return range(max(first, self.start), min(end, self.stop))

    def consume(self, first: int, rows: Tensor) -> None:
        """Take rows on their device. Copy what you keep, because the next step may use their memory.

        Args:
            first: Position of the token of the first row.
            rows: A row for each token from there on.
        """

    def fill(self, output: Any) -> None:
        """Enter the result, as far as there is one, in a new output of the request.

        Args:
            output: A `RequestOutput`, whose attribute `result` is free for it.
        """


TASKS = {"prompt_logprobs": "hf_paged.features.tasks.prompt_scores:task_of"}
"""Options of requests that are tasks: the place of a function that makes one of all options."""


def task_of(options: Any) -> Task | None:
    """Return the task that the options of a request ask for, or None."""
    asked: Iterator[Task] = (
        pkgutil.resolve_name(place)(options) for name, place in TASKS.items() if getattr(options, name) is not None
    )
    return next(asked, options.task)


class SideMemory:
    """Memory that groups need besides their block tables. By default the methods do nothing.

    `features/executors.py` makes those of an engine.

    Attributes:
        goes_back: True if a wrong draft takes a sequence back to before the step, because it keeps all of a step or
            nothing.
        stops_prompts: True if prompts may stop before the end of a step. Their remaining blocks must then be left over
            when others start.
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
    num_computed = 0
    num_hits = 0

    def bind(self, schedule: Any) -> None:
        """Take note of the scheduler when it gets block tables, for the first time or again. No group holds blocks.

        Args:
            schedule: The scheduler, to be read: `manager` and `host_manager` (block tables), `prefix_cache`, `waiting`,
                `running`, `swapped`, `next_in_line()`.
        """

    # -- a group starts, and stops ------------------------------------------------------------------------------

    def is_ready(self, group: Group) -> bool:
        """Return True if a group may start.

        Args:
            group: The first waiting group. Those behind it wait too, so it must become ready while others end.

        Returns:
            Whether it may start.
        """
        return True

    def blocks_needed(self, group: Group) -> int:
        """Return how many blocks `take` will use.

        Args:
            group: A group that is ready.

        Returns:
            A number of blocks.
        """
        return 0

    def blocks_beside(self, num_seqs: int) -> int:
        """Return how many blocks' memory the sequences of a group take besides their tables.

        Args:
            num_seqs: Sequences of the group, which is on the device or swapped out to the host.

        Returns:
            A number of blocks.
        """
        return 0

    @property
    def unlisted_blocks(self) -> tuple[int, int]:
        """Blocks that running groups use, and idle ones, which the figures of block tables lack. Of a table that no
        running group uses, which they count as used, the first number is negative."""
        return 0, 0

    def take(self, group: Group) -> None:
        """Take memory for a group that begins to run.

        Args:
            group: The group. Its first sequence has a table, with what was found in the prefix cache.
        """

    def give_up(self, group: Group, *, restarts: bool) -> None:
        """Free the memory of a group that runs no more, or that ends before it ran.

        Args:
            group: The group.
            restarts: True if it waits, to compute all of its tokens again.
        """

    def ended(self, seq: Any, *, is_lost: bool) -> None:
        """Take note that a sequence has ended.

        Args:
            seq: The sequence.
            is_lost: True for a beam that no beam continues.
        """

    # -- a step -------------------------------------------------------------------------------------------------

    def hold(self, num_drafts: int) -> bool:
        """Take memory for the drafts of the next step, instead of what was held before.

        Args:
            num_drafts: Sequences with drafts. A step begins with 0, which must be granted.

        Returns:
            False if there is too little memory; nothing has changed then.
        """
        return True

    def verified(self, seq: Any) -> None:
        """Take note that the draft of a sequence is verified.

        Args:
            seq: One of the sequences with drafts.
        """

    def settle(self) -> None:
        """Adapt what is withheld from the allocator, because other groups run or have other memory."""

    def fill(self, output: Output) -> None:
        """Enter what a step has to do for this memory.

        Args:
            output: The step, which is decided otherwise.
        """

    def computed(self, output: Output) -> None:
        """Take note that a step is computed.

        Args:
            output: The step. Its tokens are not yet counted in `num_computed_tokens`.
        """

    # -- memory that can be given up, and interrupts ------------------------------------------------------------

    def num_idle_blocks(self, but: Group | None) -> int:
        """Return how many blocks `evict` can free.

        Args:
            but: A group that may start, whose memory is not idle. None = no group.

        Returns:
            A number of blocks.
        """
        return 0

    def evict(self, but: Group | None) -> bool:
        """Free some blocks that no running group uses.

        Args:
            but: A group that may start, whose memory stays. None = no group.

        Returns:
            False if there are none.
        """
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
        """Belong to another executor from now on.

        Args:
            executor: The executor.
        """

    def unready(self) -> list[Group]:
        """Return groups that may start in the next step, if what they need is computed before it.

        Returns:
            Waiting groups, in order.
        """
        return []

    def compute(
        self, groups: list[Group], run: Callable[[Any, Callable[[], Any]], Any]
    ) -> list[tuple[Group, Exception]]:
        """Compute what these groups need before they can start.

        Args:
            groups: What `unready` has returned.
            run: `run(adapters, call)` returns what `call()` returns while a group's adapters are switched on.

        Returns:
            Failed groups with their errors. The others may start now, or are unready again.
        """
        return []

    def move(self, output: Output) -> None:
        """Do on the device what a step says, before its blocks are moved.

        Args:
            output: The step.
        """

    def can_move_again(self, output: Output) -> bool:
        """Return True if an interrupted `move` has lost nothing and can run again.

        Args:
            output: The step.

        Returns:
            Whether it can run again.
        """
        return True

    def apart(self, plan: Plan, executor: Executor) -> list[Plan]:
        """Choose the sequences of a plan that share no run with the others. A failure there ends only these.

        Args:
            plan: The sequences of a step that have the same adapters.
            executor: The executor of the step.

        Returns:
            A plan for each run of its own.
        """
        return []

    def extend(self, parts: Parts, plan: Plan, output: Output) -> None:
        """Add to parts what the executor needs besides tokens.

        Args:
            parts: Parts of the step.
            plan: The same sequences as a plan.
            output: The step.
        """

    def take_back(self, seq: Any, num_tokens: int, *, is_right: bool) -> bool:
        """Take a sequence back to before a step, if its draft was wrong.

        Args:
            seq: The sequence.
            num_tokens: Tokens that it had before the step.
            is_right: True if all of the draft was right.

        Returns:
            True if the sequence has again what it had before.
        """
        return False

    def lost(self, groups: Iterable[Group]) -> list[Group]:
        """Return the groups that an interrupted run has left without what they had.

        Args:
            groups: Running groups.

        Returns:
            Those that must be computed again.
        """
        return []

    def close(self) -> None:
        """Free the memory. The device has finished."""
