"""Choose the length of drafts from the cost of steps and the share of drafted tokens that were right."""

from __future__ import annotations

from typing import NamedTuple


class StepCost:
    """Seconds of a step by its number of tokens, `base + slope * tokens`, fitted to the last decode steps.

    Older steps count less: each weighs `KEPT` times as much as the one after it. Until steps of several sizes are
    known, the time is assumed to be twice that of one token with `double` more tokens, as on a CPU.
    """

    # About the last twenty steps count, so that a change of the load shows soon.
    KEPT = 0.95

    def __init__(self, double: int = 8) -> None:
        self._double = double
        self._sums = [0.0] * 5  # of 1, tokens, tokens^2, seconds, tokens * seconds

    @property
    def is_known(self) -> bool:
        """Return True if more than one step was measured."""
        return self._sums[0] > 1

    def add(self, num_tokens: int, seconds: float) -> None:
        new = (1.0, num_tokens, num_tokens * num_tokens, seconds, num_tokens * seconds)
        self._sums = [self.KEPT * old + value for old, value in zip(self._sums, new)]

    def seconds(self, num_tokens: int) -> float:
        """Estimate the seconds of a step with this many tokens."""
        count, tokens, squares, total, products = self._sums
        mean_tokens, mean = tokens / count, total / count
        spread = squares / count - mean_tokens**2
        slope = mean / (mean_tokens + self._double)
        # Steps of nearly one length fit any slope, so that noise would decide.
        if spread > 0.05 * mean_tokens:
            # A longer step never takes less time, nor more than in proportion; what a fit says beyond that is noise.
            slope = min(max(products / count - mean_tokens * mean, 0.0) / spread, mean / mean_tokens)
        return mean + slope * (num_tokens - mean_tokens)


class Acceptance:
    """The share of drafted tokens that were right, of those that were compared: up to the first wrong one of a draft.

    Older drafts count less.
    """

    # As in StepCost. After six compared tokens, a draft or two, a request's own count more than what is expected.
    KEPT, PRIOR = 0.95, 6.0

    def __init__(self) -> None:
        self._right = self._compared = 0.0

    def rate(self, expected: float = 0.6) -> float:
        """The share that is `expected` of others counts as much as `PRIOR` compared tokens."""
        return (self._right + self.PRIOR * expected) / (self._compared + self.PRIOR)

    def add(self, num_right: int, num_drafted: int) -> None:
        self._right = self.KEPT * self._right + num_right
        self._compared = self.KEPT * self._compared + num_right + (num_right < num_drafted)


class Demand(NamedTuple):
    """Drafts that the next step could have.

    sequences: of requests that may have drafts. asked: those for which the drafter is asked. longest: tokens of a
    draft, at most. rate: the share of drafted tokens that is expected to be right. left: tokens that a request may
    still get, at most.
    """

    sequences: int
    asked: int
    longest: int
    rate: float
    left: int


class _Outlook(NamedTuple):
    """length: of drafts from which the most tokens a second are expected. gain: these, as a multiple of those without
    drafts. possible: the same if all drafted tokens were right."""

    length: int
    gain: float
    possible: float

    @property
    def pays(self) -> bool:
        return self.gain > DraftLengths.LEAST_GAIN


class DraftLengths:
    """Chooses the length of a step's drafts. It measures the time of steps with and without drafts, so now and then a
    step *tries* drafts that are not expected to pay, or has none although they do."""

    LEAST_GAIN = 0.97
    """Expected tokens a second with drafts, as a multiple of those without, from which drafts are made. It is less than
    1 because expectations err, and only steps with drafts show how much."""

    RETRY, RETRY_ALWAYS = 32, 128
    """Steps with (or without) drafts after which a step has none (or has some), so that the cost of both stays known:
    if drafts seem to be worth nearly their cost (a gain of NEAR), and in any case. Each trial that has not paid doubles
    the steps before the next one, up to PATIENCE."""

    NEAR = 0.8, 1.25

    LEFT = 16
    """Tokens that a request must still be able to get where drafts that are not expected to pay are asked of a drafter,
    which may compute a prompt. The first trials are made for any request: others may never come."""

    PATIENCE, PATIENCE_IN_VAIN = 1024, 65536
    """In vain are trials of drafts that would gain no more than LEAST_POSSIBLE even if all of their tokens were right:
    they wait PATIENCE steps, then up to PATIENCE_IN_VAIN, until there are fewer requests."""

    LEAST_POSSIBLE = 1.02

    LEARNT, LEARNT_LENGTH = 2, 3
    """The first steps with drafts, and how long these are: they show what drafts cost."""

    MORE = 4
    """A trial that was measured and seems to pay is followed by one that asks the drafter for so many times as many
    sequences, until it is asked for all: its cost for these is guessed from that for few."""

    READ = 4
    """The time in which a drafter reads its weights for a token, in sequences of which it computes a token then."""

    FEW, SHARE = 16, 0.01
    """With more sequences than FEW, steps that only try drafts may take this share of the time of all steps."""

    EVIDENCE = 32
    """Drafted tokens that are compared before drafts that pay are more than a trial."""

    def __init__(self, *, goes_back: bool) -> None:
        """goes_back: a sequence whose draft was wrong computes its part of the step again, without a draft."""
        self._goes_back = goes_back
        self._cost = StepCost()  # of steps, without the drafter's part
        self._drafting = StepCost()  # of the drafter, by `_work`
        self._unmeasured = [2, 1]  # first steps, without and with drafts, which are slower than later ones
        self._to_learn = self.LEARNT  # steps with drafts until their cost is known
        self._num_compared = 0
        self._sequences = 0  # of the last step that was asked about
        self._seconds = self._tried = 0.0  # of all steps, and of what drafts that were only tried have added to them
        self._is_on = False  # the last step had drafts
        self._since = 0  # steps since that has changed
        self._patience = 0  # steps before the next trial, at least
        self._is_in_vain = False
        self.num_asked = 1  # sequences for which the drafter is asked in a trial
        self.is_trial = False  # the drafts of the length that was chosen last are to show what they cost and gain

    @property
    def is_learning(self) -> bool:
        """Return True if the cost of drafts is still unknown."""
        return self._to_learn > 0

    def choose(self, demand: Demand) -> int:
        """The length of the next step's drafts. 0: no drafts."""
        length = self._choose(demand)
        self._since = self._since + 1 if (length > 0) == self._is_on else 0
        self._is_on = length > 0
        return length

    def _choose(self, demand: Demand) -> int:
        self._sequences = demand.sequences
        if not self._cost.is_known:
            return 0
        # Only now: a gain is relative to a step without drafts, whose time must be known.
        outlook = self._outlook(demand)
        may_try = demand.sequences <= self.FEW or self._tried <= self.SHARE * self._seconds
        is_long = self.is_learning or not demand.asked or demand.left >= self.LEFT
        is_due = self._is_due(outlook, may_try and is_long)
        if self.is_learning:
            self.is_trial = may_try and (outlook.pays or is_due)
            return min(demand.longest, self.LEARNT_LENGTH) if self.is_trial else 0
        # The next trial begins with one sequence again, because the drafter may have to compute the prompts of all it
        # is asked for.
        if not outlook.pays:
            self.num_asked = 1
        is_known = self._num_compared >= self.EVIDENCE and self.num_asked >= demand.asked
        self.is_trial = not is_known if outlook.pays else is_due
        if self.is_trial and not may_try:
            return 0
        # A step that is due does the opposite of what seems better.
        return outlook.length if outlook.pays != is_due else 0

    def _outlook(self, demand: Demand) -> _Outlook:
        count, rate = demand.sequences, demand.rate
        asks = demand.asked > 0 and self._drafting.is_known
        plain = count / self._cost.seconds(count)
        best, gain, expected, possible = 0, 0.0, 1.0, 0.0
        for length in range(1, demand.longest + 1):
            expected += rate**length
            # A sequence whose draft was wrong computes the right part again, in a step that has no draft.
            again = 1 - rate**length if self._goes_back else 0.0  # steps, each of which has a token too
            verifying = self._cost.seconds(count * (length + 1))
            verifying += self._drafting.seconds(self._work(demand.asked, length)) if asks else 0.0
            own = count * (expected + again) / (verifying + again * self._cost.seconds(count)) / plain
            possible = max(possible, count * (length + 1) / verifying / plain)
            if own > gain:
                best, gain = length, own
        return _Outlook(best, gain, possible)

    def _work(self, num_sequences: int, length: int) -> int:
        """Estimate the drafter's cost; 1 is the time of a token of one sequence."""
        return length * (num_sequences + self.READ)

    def _is_due(self, outlook: _Outlook, may_try: bool) -> bool:
        """Return True if the next step takes the seemingly slower way (drafts, or none) to measure its cost."""
        is_in_vain = not (outlook.pays or self.is_learning) and outlook.possible <= self.LEAST_POSSIBLE
        was_in_vain, self._is_in_vain = self._is_in_vain, is_in_vain
        is_near = self.NEAR[0] < outlook.gain < self.NEAR[1]
        wait, most = self.RETRY if is_near else self.RETRY_ALWAYS, self.PATIENCE
        if self._is_in_vain:
            wait, most = self.PATIENCE, self.PATIENCE_IN_VAIN
        # Former trials in vain say nothing once drafts pay, or could pay because the batch has shrunk.
        if outlook.pays or (was_in_vain and not self._is_in_vain):
            self._patience = 0
        wait = max(wait, self._patience)
        # A trial is due only while steps go the seemingly better way; a step that changes to it is measured anyhow.
        is_due = self._since >= wait and self._is_on == outlook.pays and (outlook.pays or may_try)
        if is_due and not outlook.pays:
            self._patience = min(2 * wait, most)
        return is_due

    def compared(self, num_drafted: int) -> None:
        """So many drafted tokens were compared with those of the requests."""
        self._num_compared += num_drafted

    def drafted(self, num_sequences: int, length: int, seconds: float) -> None:
        """The drafter has taken so long for drafts of this length of so many sequences."""
        self._drafting.add(self._work(num_sequences, length), seconds)

    def took(self, num_tokens: int, seconds: float, drafting: float, *, is_usual: bool) -> None:
        """A step of so many tokens, each one the last of a sequence or drafted, has taken so long, the drafter's part
        included. is_usual: it did nothing that later steps do not."""
        self._seconds += seconds
        # A trial costs what it takes more than the step without drafts that it replaces.
        if self._is_on and self.is_trial:
            self._tried += max(seconds - self._cost.seconds(self._sequences), 0.0)
        if self._unmeasured[self._is_on]:
            self._unmeasured[self._is_on] -= 1
        elif is_usual:
            # The drafter's time grows with other numbers than the step's, so it has an estimate of its own.
            self._cost.add(num_tokens, seconds - drafting)
            if self._is_on and not self.is_learning and self.num_asked < self._sequences:
                self.num_asked *= self.MORE
            self._to_learn -= self._is_on
