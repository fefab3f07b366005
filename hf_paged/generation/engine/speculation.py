"""Speculation: which sequences of a step get drafts, and how long ones. Knows requests and times; never tensors."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterable, Mapping

from hf_paged.generation.drafts import Drafter, PromptLookup, Wanted
from hf_paged.generation.engine.tables import Drafts
from hf_paged.generation.requests.request import Request
from hf_paged.generation.requests.sequence import SeqStatus, Sequence, SequenceGroup


class StepCost:
    """Seconds of a step by its number of tokens, `base + slope * tokens`, fitted to the last decode steps.

    Older steps count less: each weighs `KEPT` times as much as the one after it. Until steps of several sizes are
    known, the time is assumed to be twice that of one token with `double` more tokens, as on a CPU.
    """

    KEPT = 0.95

    def __init__(self, double: int = 8) -> None:
        self._double = double
        self._sums = [0.0] * 5  # of 1, tokens, tokens^2, seconds, tokens * seconds

    @property
    def is_known(self) -> bool:
        """Whether more than one step was measured."""
        return self._sums[0] > 1

    def add(self, num_tokens: int, seconds: float) -> None:
        new = (1.0, num_tokens, num_tokens * num_tokens, seconds, num_tokens * seconds)
        self._sums = [self.KEPT * old + value for old, value in zip(self._sums, new)]

    def seconds(self, num_tokens: int) -> float:
        """Of a step of so many tokens."""
        count, tokens, squares, total, products = self._sums
        mean_tokens, mean = tokens / count, total / count
        spread = squares / count - mean_tokens**2
        slope = mean / (mean_tokens + self._double)
        if spread > 0.05 * mean_tokens:
            slope = min(max(products / count - mean_tokens * mean, 0.0) / spread, mean / mean_tokens)
        return mean + slope * (num_tokens - mean_tokens)


class Acceptance:
    """The share of drafted tokens that were right, of those that were compared: up to the first wrong one of a draft.

    Older drafts count less.
    """

    KEPT, PRIOR = 0.95, 6.0

    def __init__(self) -> None:
        self._right = self._compared = 0.0

    def rate(self, expected: float = 0.6) -> float:
        """The share that is `expected` of others counts as much as `PRIOR` compared tokens."""
        return (self._right + self.PRIOR * expected) / (self._compared + self.PRIOR)

    def add(self, num_right: int, num_drafted: int) -> None:
        self._right = self.KEPT * self._right + num_right
        self._compared = self.KEPT * self._compared + num_right + (num_right < num_drafted)


class Speculation:
    """The drafts of an engine's requests.

    A request drafts if its config has `prompt_lookup_num_tokens`, or if the engine has a `drafter`. How long drafts are
    depends on the cost of a step with so many more tokens, and on how many drafted tokens of these requests were right:
    they are as long as the most tokens a second are expected from, which may be none. `num_assistant_tokens_schedule=
    "constant"` in a config asks for the greatest length always.
    """

    LEAST_GAIN = 1.02
    """Expected tokens a second with drafts, as a multiple of those without, from which drafts are made."""
    RETRY, RETRY_ALWAYS = 32, 128
    """Steps with (or without) drafts after which a step has none (or has some), so that the cost of both stays known:
    if drafts seem to be worth nearly their cost, and in any case. Each trial that has not paid doubles the steps before
    the next one, up to PATIENCE."""
    PATIENCE, PATIENCE_IN_VAIN = 1024, 65536
    """In vain are trials of drafts that would not pay even if all of their tokens were right: they wait PATIENCE steps,
    then up to PATIENCE_IN_VAIN, until there are fewer requests."""

    LEARNT, LEARNT_LENGTH = 2, 2
    """The first steps with drafts, and how long these are: they show what drafts cost."""

    FEW, SHARE = 16, 0.01
    """With more requests than FEW, steps that only try drafts may take this share of the time of all steps."""

    TRIAL, TRIAL_ASKED, EVIDENCE = 4, 2, 32
    """Requests that get drafts in such a step, and in the first ones, until so many drafted tokens were compared; fewer
    of those for which the drafter is asked, because it may compute their prompts: one, until its cost is known."""

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
        self._cost = StepCost()  # of steps, without the drafter's part
        self._drafting = StepCost(2)  # of the drafter, for one token of so many sequences, with the tokens before it
        self._asking = 0.0  # seconds that the drafter has taken before this step
        self._unmeasured = [2, 1]  # first steps, without and with drafts, which are slower than later ones
        self._to_learn = self.LEARNT  # steps with drafts until their cost is known
        self._is_trial = False  # the next step has drafts to see what they cost and gain
        self._num_ready = 0  # requests that could have drafts in it
        self._seconds = self._tried = 0.0  # of all steps, and of what drafts that were only tried have added to them
        self._num_compared = 0
        self._is_on = False  # the last step had drafts
        self._since = 0  # steps since that has changed
        self._patience = 0  # steps before the next trial, at least
        self._is_in_vain = False
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
        self._compare_guesses()
        ready = {request: most for request, _ in self.requests.values() if (most := self._room(request))}
        if not ready:
            return {}
        length = self._best_length(ready)
        self._since = self._since + 1 if (length > 0) == self._is_on else 0
        self._is_on = length > 0
        chosen = self._few(ready) if self._is_trial else ready
        lengths = {
            request: most if request.drafts_always else min(most, length) if request in chosen else 0
            for request, most in ready.items()
        }
        return self._made(lengths)

    def _few(self, ready: Iterable[Request]) -> list[Request]:
        """Those of a step that only tries drafts."""
        few = list(itertools.islice(ready, self.TRIAL))
        asked = [request for request in few if request.lookup_ngram is None]
        num_asked = 1 if self._to_learn > 0 else self.TRIAL_ASKED
        return [request for request in few if request.lookup_ngram is not None or request in asked[:num_asked]]

    def _made(self, lengths: Mapping[Request, int]) -> Drafts:
        drafts = self._made_alone(lengths)
        for request in lengths:
            live = request.group.live
            if len(live) > 1:  # samples go on together
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
                    found = self._lookups[seq].draft(seq.token_ids, max(most, 1))
                    if found and most:
                        drafts[seq] = found
                    elif found:
                        self._guesses[seq] = len(seq.token_ids), found[0]
                elif most:
                    others.append((seq, Wanted(seq.seq_id, seq.token_ids, most)))
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
            if longest and not self._is_first:
                self._drafting.add(len(drafts), self._asking / longest)
            return drafts
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
        self._num_compared += num_drafted
        self._all.add(num_right, num_drafted)
        self.requests[seq.group][1].add(num_right, num_drafted)

    def _best_length(self, ready: Mapping[Request, int]) -> int:
        """The length of drafts from which the most tokens a second are expected. 0: no drafts."""
        longest, count = max(ready.values()), sum(len(request.group.live) for request in ready)
        self._num_ready = count
        if not self._cost.is_known:
            return 0
        may_try = count <= self.FEW or self._tried <= self.SHARE * self._seconds
        of_all = self._all.rate()  # requests that have not drafted are expected to be like those that have
        rate = sum(self.requests[request.group][1].rate(of_all) for request in ready) / len(ready)
        asked = sum(len(request.group.live) for request in ready if request.lookup_ngram is None)
        drafting = self._drafting.seconds(asked) if asked and self._drafting.is_known else 0.0
        plain = count / self._cost.seconds(count)
        best, gain, expected, possible = 0, 0.0, 1.0, 0.0
        for length in range(1, longest + 1):
            expected += rate**length
            again = 1 - rate**length if self._goes_back else 0.0  # steps, each of which has a token too
            verifying = self._cost.seconds(count * (length + 1)) + length * drafting
            own = count * (expected + again) / (verifying + again * self._cost.seconds(count)) / plain
            possible = max(possible, count * (length + 1) / verifying / plain)
            if own > gain:
                best, gain = length, own
        pays = gain > self.LEAST_GAIN
        was_in_vain, self._is_in_vain = self._is_in_vain, possible <= self.LEAST_GAIN and self._to_learn <= 0
        wait, most = self.RETRY if gain > 0.8 else self.RETRY_ALWAYS, self.PATIENCE
        if self._is_in_vain:
            wait, most = self.PATIENCE, self.PATIENCE_IN_VAIN
        self._patience = 0 if pays or (was_in_vain and not self._is_in_vain) else self._patience
        is_due = self._since >= max(wait, self._patience) and self._is_on == pays and (pays or may_try)
        if is_due and not pays:
            self._patience = min(2 * max(wait, self._patience), most)
        if self._to_learn > 0:
            self._is_trial = may_try and (pays or is_due)
            return min(longest, self.LEARNT_LENGTH) if self._is_trial else 0
        self._is_trial = self._num_compared < self.EVIDENCE if pays else is_due
        if self._is_trial and not may_try:
            return 0
        return best if pays != is_due else 0

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, each one the last of a sequence or drafted, has taken so long."""
        self._seconds += seconds
        if self._is_on and self._is_trial:
            self._tried += max(seconds - self._cost.seconds(self._num_ready), 0.0)
        if self._unmeasured[self._is_on]:
            self._unmeasured[self._is_on] -= 1
        elif not self._is_first:
            self._cost.add(num_tokens, seconds - self._asking)
            self._to_learn -= self._is_on

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
        if group.width > 1 and self._goes_back:  # the states of samples that fork within a draft would be others
            return 0
        for seq in group.live:
            if seq.num_uncomputed_tokens != 1 or seq.parent is not None:
                return 0
        # The step samples one token more than the draft has.
        return min(request.draft_length, request.max_length - request.length - 1)
