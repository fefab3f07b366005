"""The contract tests fail when they should: a comparison that passes with an injected fault is worthless.

Faults (tests/sabotage.py), and the tests that must notice them:

- copies: the block copies of copy-on-write are skipped. Parallel sampling, beam search and beam sampling, whose rows
  share a partly filled last block (the tests assert `cow_copies > 0`).
- mask: the left padding of a ragged batch is ignored. Every mode.
- parents: a beam that continues another gets the K/V of a third one. Every beam mode, and reorder in the dense view.
- writes: some K/V never reaches its block. Every test, including single rows, assisted decoding and conversations.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import hf_paged
from tests import conftest, models, sabotage
from tests.generation import test_contract_inputs as inputs
from tests.generation import test_contract_modes as modes
from tests.generation import test_contract_processors as processors
from tests.generation import test_conversations as conversations

compare = conftest.compare
Check = Callable[[str], object]

CORE: dict[str, Check] = {
    "greedy": lambda family: modes.test_greedy(family, compare),
    "sampling": lambda family: modes.test_sampling(family, compare),
    "parallel sampling": lambda family: modes.test_parallel_sampling(family, 4.0, compare),
    "beam search": lambda family: modes.test_beam_search(family, False, 1.0, 5, 3, compare),
    "beam sampling": lambda family: modes.test_beam_sampling(family, 2, compare),
    "assisted": lambda family: modes.test_assisted_decoding(family, False, compare),
    "prompt lookup": lambda family: modes.test_prompt_lookup_decoding(family, False, compare),
    "right padding with beams": lambda family: inputs.test_other_masks(family, inputs.BEAMS, "right padding", compare),
    "one row": lambda family: inputs.test_prompt_lengths(family, 53, inputs.GREEDY, compare),
    "scores": lambda family: processors.test_return_dict(family, "beams", "scores", compare),
    "user processor": lambda family: processors.test_user_processor(family, "beams", {}, compare),
    "conversation": lambda family: conversations.test_turns(family, "greedy", (5, 19, 12)),
}
BEAMS = ("beam search", "beam sampling", "scores", "user processor")
NOTICES = {
    "copies": (*BEAMS, "parallel sampling", "right padding with beams"),
    "mask": (*BEAMS, "greedy", "sampling", "parallel sampling", "conversation"),
    "parents": (*BEAMS, "right padding with beams"),
    "writes": tuple(CORE),
}


@pytest.mark.slow
@pytest.mark.parametrize("noticed", [(fault, check) for fault, names in NOTICES.items() for check in names], ids=str)
@pytest.mark.covering(1)
def test_fault_is_noticed(family: str, noticed: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    fault, check = noticed
    # Examine the model before the fault: a faulty probe would make the call take another route.
    hf_paged.check(models.shared(family))
    sabotage.FAULTS[fault](monkeypatch)
    # A block that was never written may hold NaN, which torch.multinomial refuses.
    with pytest.raises((AssertionError, RuntimeError)):
        CORE[check](family)
