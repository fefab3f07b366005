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
from tests.generation import test_contract_outputs as outputs
from tests.generation import test_contract_processors as processors
from tests.generation import test_contract_state as state

compare = conftest.compare
Check = Callable[[str], object]

CORE: dict[str, Check] = {
    "greedy": lambda family: modes.test_greedy(family, compare),
    "sampling": lambda family: modes.test_sampling(family, compare),
    "parallel sampling": lambda family: modes.test_parallel_sampling(family, 4.0, compare),
    "beam search": lambda family: modes.test_beam_search(family, False, compare),
    "beams with return sequences": lambda family: modes.test_beams_and_return_sequences(family, 5, 3, compare),
    "beam sampling": lambda family: modes.test_beam_sampling(family, 2, compare),
    "right padding with beams": lambda family: inputs.test_right_padding(family, inputs.BEAMS, compare),
    "assisted": lambda family: modes.test_assisted_decoding(family, False, compare),
    "prompt lookup": lambda family: modes.test_prompt_lookup_decoding(family, False, compare),
    "one row": lambda family: inputs.test_prompt_lengths(family, 53, inputs.GREEDY, compare),
    "scores": lambda family: outputs.test_return_dict(family, "beams", {"output_scores": True}, compare),
    "user processor": lambda family: processors.test_user_processor(family, "beams", {}, compare),
    "multi-turn": lambda family: state.test_multi_turn(family, "greedy"),
    "multi-turn batch": lambda family: state.test_multi_turn_batch(family),
}
BEAMS = ("beam search", "beams with return sequences", "beam sampling", "scores", "user processor")
NOTICES = {
    "copies": (*BEAMS, "parallel sampling", "right padding with beams"),
    "mask": (*BEAMS, "greedy", "sampling", "parallel sampling", "multi-turn batch"),
    "parents": (*BEAMS, "right padding with beams"),
    "writes": tuple(CORE),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "check"), [(fault, check) for fault, names in NOTICES.items() for check in names])
@pytest.mark.covering(2)
def test_fault_is_noticed(family: str, fault: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Examine the model before the fault: a faulty probe would make the call take another route.
    hf_paged.check(models.shared(family))
    sabotage.FAULTS[fault](monkeypatch)
    # A block that was never written may hold NaN, which torch.multinomial refuses.
    with pytest.raises((AssertionError, RuntimeError)):
        CORE[check](family)
