"""How often drafts are made and tried, by a clock of our own."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from types import SimpleNamespace
from typing import Any

import pytest

from hf_paged.features.speculation import speculation
from hf_paged.features.speculation.draft_lengths import Demand, DraftLengths
from hf_paged.features.speculation.drafts import Wanted
from hf_paged.features.speculation.speculation import Speculation
from hf_paged.generation.requests.sequence import SeqStatus


class Machine:
    """Steps of 20 ms and 1.5 ms a token, and a drafter of `drafting` seconds a token and `reading` seconds a place."""

    num_assistant_tokens = 4
    reading = 0.0

    def __init__(self, drafting: float, share: float, patch: pytest.MonkeyPatch, *, new_tokens: int = 10**9) -> None:
        self.new_tokens = new_tokens
        self.now, self.drafting, self.share = 0.0, drafting, share
        patch.setattr(speculation, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.speculation: Any = Speculation(self, 100)

    def draft(self, wanted: SequenceOf[Wanted]) -> list[list[int]]:
        self.now += self.drafting * sum(each.most for each in wanted) + self.reading * wanted[0].most
        return [[7] * each.most for each in wanted]

    def begin(self, number: int) -> None:
        seq = Record(seq_id=number, token_ids=[3], num_uncomputed_tokens=1, parent=None)
        group = Record()
        group.live, group.sequences, group.status = [seq], [seq], SeqStatus.RUNNING
        group.width, group.is_finished, group.media = 1, False, None
        seq.group = group
        request = Record()
        request.group, request.draft_length, request.drafts_always, request.lookup_ngram = group, 4, False, None
        request.length, request.max_length = 1, 1 + self.new_tokens
        self.speculation.begin(request)

    def steps(self, count: int) -> list[int]:
        """Drafted tokens of each step, of which all or none are right."""
        found = []
        for _ in range(count):
            started = self.now
            drafts = self.speculation.draft(verifies=True)
            drafted = sum(map(len, drafts.values()))
            rows = len(self.speculation.requests)
            self.now += 0.02 + 0.0015 * (rows + drafted)
            for seq, draft in drafts.items():
                self.speculation.verified(seq, round(self.share) * len(draft), len(draft))
            self.speculation.took(rows + drafted, self.now - started)
            found.append(drafted)
        return found


class Record(SimpleNamespace):
    """A request, its group, or its sequence."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def test_wrong_drafts_are_tried_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be right later."""
    machine = Machine(0.001, 0.0, monkeypatch)
    machine.begin(0)
    assert 10 <= sum(map(bool, machine.steps(10000))) <= 40
    machine.share = 1.0
    assert sum(map(bool, machine.steps(4000))) > 2000


def test_a_drafter_is_soon_asked_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight sequences cost it little more than one."""
    machine = Machine(0.0001, 1.0, monkeypatch)
    machine.reading = 0.002
    for number in range(8):
        machine.begin(number)
    assert min(machine.steps(32)[20:]) >= 8


@pytest.mark.parametrize(("gain", "is_made"), [(1.0, True), (0.9, False)])
def test_drafts_are_made_where_they_lose_nothing(gain: float, is_made: bool) -> None:
    """Only steps with drafts show that an expectation was too low."""
    lengths, demand = DraftLengths(goes_back=False), Demand(sequences=1, asked=0, longest=1, rate=0.6, left=1000)
    chosen = []
    for _ in range(200):
        chosen.append(lengths.choose(demand))
        seconds = 0.01 * (1 + 0.6) / gain if chosen[-1] else 0.01
        lengths.compared(chosen[-1])
        lengths.took(1 + chosen[-1], seconds, 0.0, is_usual=True)
    assert (sum(chosen[100:]) > 50) is is_made


def test_short_requests_are_tried_at_first_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may have no others; but a later trial, not expected to pay, may compute a prompt for few tokens."""
    for count in (1, 16):  # one for which drafts are expected to pay before they are known, and one for which not
        machine = Machine(0.0001, 1.0, monkeypatch, new_tokens=13)
        for number in range(count):
            machine.begin(number)
        assert sum(machine.steps(100)) > 100
    found = []
    for new_tokens in (13, 100):
        machine = Machine(0.001, 0.0, monkeypatch, new_tokens=new_tokens)
        machine.begin(0)
        machine.steps(100)
        found.append(sum(machine.steps(2000)))
    assert found[0] == 0 < found[1]
