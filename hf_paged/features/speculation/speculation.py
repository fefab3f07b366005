"""Speculation: which sequences of a step get drafts, and how long ones. Knows requests and times; never tensors."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterable, Mapping

from hf_paged.features.speculation.draft_lengths import Acceptance, Demand, DraftLengths
from hf_paged.features.speculation.drafts import Drafter, PromptLookup, TokenView, Wanted
from hf_paged.generation.engine.tables import Drafts
from hf_paged.generation.requests.request import Request
from hf_paged.generation.requests.sequence import SeqStatus, Sequence, SequenceGroup


class Speculation:
    """The drafts of an engine's requests.

    A request drafts if its config has `prompt_lookup_num_tokens`, or if the engine has a `drafter`. How long drafts are
    depends on the cost of a step with so many more tokens, and on how many drafted tokens of these requests were right:
    they are as long as the most tokens a second are expected from, which may be none. `num_assistant_tokens_schedule=
    "constant"` in a config asks for the greatest length always.
    """

    TRIAL = 4
    """Requests that get drafts in a step that tries them; at first fewer of those for which the drafter is asked,
    because it may compute their prompts."""

    def __init__(self, drafter: Drafter | None = None, vocabulary: int = 0, *, goes_back: bool = False) -> None:
        """vocabulary: token ids of drafts are less than this. goes_back: a sequence whose draft was wrong computes its
        part of the step again, in a step without a draft."""
        self.drafter = drafter
        self._failed: Drafter | None = None  # this one is not asked again
        self._goes_back = goes_back
        self._vocabulary = vocabulary
        self.requests: dict[SequenceGroup, tuple[Request, Acceptance]] = {}  # those that may get drafts
        self._lookups: dict[Sequence, PromptLookup] = {}
        self._all = Acceptance()
        self._guesses: dict[Sequence, tuple[int, int]] = {}  # positions and tokens of guesses that no step verifies
        self._lengths = DraftLengths(goes_back=goes_back)
        self._asking = 0.0  # seconds that the drafter has taken before this step
        self._asked: set[int] = set()  # sequences that the drafter knows
        self._is_first = False  # the drafter met a sequence for the first time, whose prompt it may have computed
        self.num_drafts = self.drafted_tokens = self.accepted_tokens = 0
        self.accepted_by_position: list[int] = []  # of a draft

    def begin(self, request: Request) -> None:
        """A request that drafts has been admitted."""
        self.requests.setdefault(request.group, (request, Acceptance()))

    def draft(self, *, verifies: bool) -> Drafts:
        """For the next step, between two steps. verifies: whether it can verify drafts; without, there are none."""
        for group in [group for group in self.requests if group.is_finished]:
            del self.requests[group]
            for seq in group.sequences:
                self._lookups.pop(seq, None)
        self._is_first, self._asking = False, 0.0
        if not verifies:
            return {}
        # Before the lengths are chosen, which depend on what was right.
        self._compare_guesses()
        ready = {request: most for request, _ in self.requests.values() if (most := self._room(request))}
        if not ready:
            return {}
        length = self._lengths.choose(self._demand(ready))
        chosen = self._few(ready) if self._lengths.is_trial else ready
        lengths = {
            request: most if request.drafts_always else min(most, length) if request in chosen else 0
            for request, most in ready.items()
        }
        return self._made(lengths)

    def _few(self, ready: Iterable[Request]) -> list[Request]:
        """Choose the requests that get drafts in a trial step.

        They are the first `TRIAL` with prompt lookup, and others of the drafter until it has `num_asked` sequences.
        """
        few = list(itertools.islice((request for request in ready if request.lookup_ngram is not None), self.TRIAL))
        left = self._lengths.num_asked
        for request in ready:
            if request.lookup_ngram is None and left > 0:
                few.append(request)
                left -= len(request.group.live)
        return few

    def _made(self, lengths: Mapping[Request, int]) -> Drafts:
        drafts = self._made_alone(lengths)
        for request in lengths:
            live = request.group.live
            if len(live) > 1:  # samples continue together
                # One step samples the next tokens of all of them.
                length = min(len(drafts.get(seq, ())) for seq in live)
                for seq in live:
                    draft = drafts.pop(seq, ())[:length]
                    if draft:
                        drafts[seq] = draft
        return drafts

    def _made_alone(self, lengths: Mapping[Request, int]) -> Drafts:
        drafts: Drafts = {}
        others: list[tuple[Sequence, Wanted]] = []
        for request, most in lengths.items():
            for seq in request.group.live:
                if request.lookup_ngram is not None:
                    if seq not in self._lookups:
                        self._lookups[seq] = PromptLookup(request.lookup_ngram)
                    # Without a draft, one guess shows whether drafts would be right.
                    found = self._lookups[seq].draft(seq.token_ids, max(most, 1))
                    if found and most:
                        drafts[seq] = found
                    elif found:
                        self._guesses[seq] = len(seq.token_ids), found[0]
                elif most:
                    others.append((seq, Wanted(seq.seq_id, TokenView(seq.token_ids), most)))
        made = self._ask([wanted for _, wanted in others]) if others else []
        drafts.update({seq: draft for (seq, _), draft in zip(others, made) if draft})
        return drafts

    def _ask(self, wanted: list[Wanted]) -> list[list[int]]:
        """The drafter's drafts. If it fails, which changes no result, it is not asked again."""
        if self.drafter is None or self.drafter is self._failed:
            return []
        asked = {each.seq_id for each in wanted}
        self._is_first, self._asked = not asked <= self._asked, asked
        started = time.perf_counter()
        try:
            made = zip(wanted, self.drafter.draft(wanted), strict=True)
            drafts = [[int(token) for token in draft[: each.most]] for each, draft in made]
            if any(not 0 <= token < self._vocabulary for draft in drafts for token in draft):
                raise ValueError(f"a draft has a token id outside of the vocabulary of {self._vocabulary} tokens")
            self._asking = time.perf_counter() - started
            longest = max(map(len, drafts), default=0)
            # A first draft computes a prompt too, so its time says nothing of later ones.
            if longest and not self._is_first:
                self._lengths.drafted(len(drafts), longest, self._asking)
            return drafts
        # A drafter may be code of the caller, and no result depends on what it drafts.
        except Exception as error:
            self._failed = self.drafter
            warnings.warn(
                f"assistant_model failed ({type(error).__name__}: {error}), so this engine drafts no more; its results "
                "are the same without drafts",
                RuntimeWarning,
                stacklevel=2,
            )
            return []

    def _compare_guesses(self) -> None:
        """Guesses of requests without drafts show whether drafts would be right."""
        for seq, (position, token) in self._guesses.items():
            if seq.group in self.requests and position < len(seq.token_ids):
                self._compared(seq, int(seq.token_ids[position] == token), 1)
        self._guesses.clear()

    def _compared(self, seq: Sequence, num_right: int, num_drafted: int) -> None:
        self._lengths.compared(num_drafted)
        self._all.add(num_right, num_drafted)
        self.requests[seq.group][1].add(num_right, num_drafted)

    def _demand(self, ready: Mapping[Request, int]) -> Demand:
        of_all = self._all.rate()  # requests that have not drafted are expected to be like those that have
        rate = sum(self.requests[request.group][1].rate(of_all) for request in ready) / len(ready)
        asked = sum(len(request.group.live) for request in ready if request.lookup_ngram is None)
        left = max(request.max_length - request.length for request in ready)
        return Demand(sum(len(request.group.live) for request in ready), asked, max(ready.values()), rate, left)

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, each one the last of a sequence or drafted, has taken so long."""
        self._lengths.took(num_tokens, seconds, self._asking, is_usual=not self._is_first)

    def verified(self, seq: Sequence, num_right: int, num_drafted: int) -> None:
        """So many tokens of a draft were right."""
        self.num_drafts += 1
        self.drafted_tokens += num_drafted
        self.accepted_tokens += num_right
        by_position = self.accepted_by_position
        by_position += [0] * (num_drafted - len(by_position))
        for position in range(num_right):
            by_position[position] += 1
        if seq.group in self.requests:
            self._compared(seq, num_right, num_drafted)

    def _room(self, request: Request) -> int:
        """The tokens that a draft may have now; 0 if the next step does not decode the request."""
        group = request.group
        if group.status is not SeqStatus.RUNNING:
            return 0
        if group.media is not None and group.live[0].num_computed_tokens < group.num_prompt_tokens:
            return 0  # a step of a prompt with media is a forward that verifies nothing
        if group.width > 1 and self._goes_back:  # the states of samples that fork within a draft would be others
            return 0
        for seq in group.live:
            if seq.num_uncomputed_tokens != 1 or seq.parent is not None:
                return 0
        # The step samples one token more than the draft has.
        return min(request.draft_length, request.max_length - request.length - 1)
