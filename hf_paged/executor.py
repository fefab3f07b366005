"""Executor: a way to compute a model. See `sockets.py`. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        """Return the executor that computes the model from now on: this one, or another over the same memory. reason:
        the third-party code that is in the model; None: there is none."""
        return self

    def follow_structure(self) -> None:
        """Follow replaced modules of the model, whose K/V fits the memory."""

    def measure(self, tried: Any, num_tokens: int) -> None:
        """Compute some tokens, so that every layer allocates its K/V. tried: the model, or a copy of it that computes
        instead. num_tokens: the most tokens to compute."""

    # -- a run, and what follows the tables ---------------------------------------------------------------------

    def pack(self, parts: Parts) -> Any:
        """Return what `run` makes of parts before it computes anything; it is also kept in `parts.packed`."""

    def run(self, parts: Parts) -> Results:
        """Compute these parts, whose tokens have slots, and write their K/V to the blocks. See `Results`."""
        raise NotImplementedError

    def fork(self, parent_id: int, child_id: int) -> None:
        """Give a new sequence what is kept of another one."""

    def free(self, seq_id: int) -> None:
        """Drop what is kept of a sequence, because it has ended or begins again."""

    def give_states(self, seq_ids: Sequence[int], cache: Any) -> None:
        """Give a cache of transformers what is kept of the sequences that are its rows from now on."""

    def suspend(self, seq_id: int, num_tokens: int) -> None:
        """Put aside what is kept of a sequence that is swapped out. The next run with it takes it back. num_tokens: how
        many of its tokens are computed."""

    # -- its memory ---------------------------------------------------------------------------------------------

    def drop_overrides(self) -> None:
        """Free packed weights."""

    def close(self) -> None:
        """Drop what is kept of all sequences. The device has finished."""
