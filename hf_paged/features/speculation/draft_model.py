"""ModelDrafter: drafts by a smaller model, whose K/V is in a pool of its own."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_paged.config import CacheConfig, SchedulerConfig, Switches
from hf_paged.errors import UnsupportedModelError
from hf_paged.features.adapters.adapters import Adapters
from hf_paged.features.ranks.parallel import make_runner
from hf_paged.features.speculation.drafts import Drafter, Wanted
from hf_paged.features.speculation.translation import TranslatedDrafter
from hf_paged.fused.cpu.draft import DraftLoop, has_loops
from hf_paged.generation.engine.sizing import OpenedMemory, open_memory
from hf_paged.generation.engine.tables import SchedulerOutput
from hf_paged.generation.requests.sequence import Plan, Sequence, SequenceGroup
from hf_paged.generation.validation import position_limit, shown
from hf_paged.kernels.sampling import greedy
from hf_paged.model.state import state_of, unwrapped

THRESHOLD = 0.4
"""`assistant_confidence_threshold`, where the model's config has none: as in transformers."""


def make_drafter(
    given: Any,
    opened: OpenedMemory,
    cache_config: CacheConfig,
    config: SchedulerConfig,
    *,
    tokenizer: Any = None,
    own_tokenizer: Any = None,
) -> Drafter | None:
    """Make the drafter of an engine on `opened` from a model or a Drafter; None if `given` is None.

    tokenizer: the engine's. own_tokenizer: of a drafting model with a tokenizer of its own. Raises ValueError if
    `given` cannot draft for this engine, and UnsupportedModelError for a model that cannot be paged.
    """
    if own_tokenizer is not None and (given is None or isinstance(given, Drafter)):
        raise ValueError("assistant_tokenizer belongs to a model that drafts; give assistant_model=, or leave it out")
    if given is None:
        return None
    # Drafters of the caller's too: no step would verify what they draft.
    if not opened.executor.verifies:
        raise ValueError(
            f"assistant_model: {type(opened.executor.model).__name__} computes next tokens one by one (hf_paged.check "
            "says why), so that no step verifies drafts; leave it out"
        )
    if isinstance(given, Drafter):
        return given
    if not isinstance(unwrapped(given), PreTrainedModel):
        raise ValueError(
            f"assistant_model={shown(given)}: a causal LM of transformers is needed, or an object with a method "
            "draft(wanted) (hf_paged.Drafter)"
        )
    sizes = [vocabulary(model) for model in (given, opened.executor.model)]
    if own_tokenizer is not None and tokenizer is None:
        raise ValueError("assistant_tokenizer: drafts are translated; give tokenizer=, that of the engine's model, too")
    if sizes[0] != sizes[1] and own_tokenizer is None:
        raise ValueError(
            f"assistant_model: {type(given).__name__} has a vocabulary of {sizes[0]} tokens, the engine's model one of "
            f"{sizes[1]}; give a model with the same tokenizer, or both tokenizers (tokenizer=, assistant_tokenizer=)"
        )
    # On a GPU the engine's pool takes the free memory by default, which leaves none for a second model's K/V.
    is_sized = cache_config.memory is not None or cache_config.num_blocks is not None
    if not is_sized and any(device.type != "cpu" for device in opened.executor.memory.pool.bytes_per_block_by_device):
        raise ValueError(
            "assistant_model: its K/V takes memory beside the model's; give CacheConfig(memory=...) that leaves room "
            "for as many tokens of it"
        )
    manager = opened.executor.memory.manager
    # As many tokens as the engine's pool holds, where each takes a slot in every group.
    num_blocks = max(1, manager.allocator.num_blocks // max(1, len(manager.groups)))
    return translated(ModelDrafter(given, num_blocks, manager.block_size, config), tokenizer, own_tokenizer)


def translated(drafter: ModelDrafter, tokenizer: Any, own_tokenizer: Any) -> ModelDrafter | TranslatedDrafter:
    """A drafter for requests in the tokens of `tokenizer`. own_tokenizer: the drafter's; None: the same."""
    if own_tokenizer is None or tokenizer.get_vocab() == own_tokenizer.get_vocab():
        return drafter
    return TranslatedDrafter(drafter, tokenizer, own_tokenizer)


def close_drafter(drafter: Drafter | None) -> None:
    """Free the memory of a model that drafts."""
    if isinstance(drafter, TranslatedDrafter):
        drafter = drafter.drafter
    if isinstance(drafter, ModelDrafter):
        drafter.close()


def vocabulary(model: Any) -> int:
    """The size of a model's vocabulary, in tokens."""
    size: int = model.config.get_text_config().vocab_size
    return size


@dataclass(slots=True)
class _Followed:
    """seq: the sequence here. num_known: its tokens that the engine has given; drafted ones follow."""

    seq: Sequence
    num_known: int


class ModelDrafter:
    """Drafts the most likely tokens of a model, greedily, all sequences together.

    A draft ends before a token to which the model gives less than `assistant_confidence_threshold` of its generation
    config. A sequence keeps its K/V from draft to draft, but
    for what the engine has refused; those that asked longest ago lose theirs when blocks are short. A call computes at
    most `token_budget` tokens of prompts: a sequence with more left gets no draft yet.
    """

    ATTEMPTS = 8
    """Drafts after which a model that has no loop yet is not asked for one again."""

    ALIKE = 0.9
    """The share of equal tokens with which a loop is trusted."""

    def __init__(self, model: Any, num_blocks: int, block_size: int, config: SchedulerConfig) -> None:
        # A draft changes no result, so its bits may vary, and a sequence that has lost its blocks is computed again.
        own = replace(config, prefix_caching=False, prefix_eviction="lru")
        own = replace(own, preemption="recompute", batch_invariant=False)
        opened = open_memory(model, CacheConfig(num_blocks=num_blocks, block_size=block_size), own, Switches())
        if not opened.executor.is_packed:
            raise UnsupportedModelError(
                f"assistant_model: {type(model).__name__} does not run packed (hf_paged.check says why); give another"
            )
        self._model = opened.executor.model
        self._manager, self._memory = opened.executor.memory.manager, opened.executor.memory
        self._runner = make_runner(opened, Adapters(model), config.max_num_seqs, Switches())
        self._token_budget = config.token_budget
        limits = [limit for limit in (position_limit(model), opened.executor.max_length) if limit is not None]
        self._longest = min(limits, default=math.inf)
        threshold = model.generation_config.assistant_confidence_threshold
        threshold = THRESHOLD if threshold is None else threshold
        self._least = math.log(threshold) if threshold > 0 else -math.inf
        self._is_rotated_alike = opened.executor.max_length is None  # whatever the length
        self._loop: DraftLoop | None = None
        self._is_trusted = False  # it has been compared
        self._attempts = 0
        self._computed_with = (-1, -1)
        self._followed: OrderedDict[int, _Followed] = OrderedDict()  # by the ids of the engine; by last use
        if has_loops(model):
            self._warm_up()

    def _warm_up(self) -> None:
        """Find the loop now, not while requests wait: its head is made, and what it drafts is compared."""
        # The first draft runs the layers in steps; later ones find the loop, compare it and use it. Lengths grow as
        # those of a request do.
        for length in (8, 9, 10, 11):
            self.draft([Wanted(-1, [0] * length, 4)])
        self._forget()  # nothing, if the model has fewer positions, or hooks

    def draft(self, wanted: SequenceOf[Wanted]) -> list[list[int]]:
        """See `Drafter`."""
        self._runner.look()
        self._runner.follow_model()
        drafts: list[list[int]] = [[] for _ in wanted]
        if not self._runner.is_packed:  # third-party code runs in it now
            return drafts
        rooms = [int(min(each.most, self._longest - len(each.token_ids))) for each in wanted]
        seqs = {index: self._follow(each) for index, each in enumerate(wanted) if rooms[index] > 0}
        if not seqs:
            return drafts
        loop = self._find_loop()
        if loop is not None and self._is_trusted:
            seqs = self._without_prompts(loop, seqs)
            if not seqs:
                return drafts
        # What is drafted in the loop and in steps is compared, so both begin from here.
        before = [(len(seq.token_ids), seq.num_computed_tokens) for seq in seqs.values()]
        quick = None if loop is None else self._draft_in_loop(loop, seqs, before, rooms)
        if quick is not None and self._is_trusted:
            for index, draft in quick.items():
                drafts[index] = draft
            return drafts
        if quick is not None:
            self._take_all_back(seqs.values(), before)
        self._draft_in_steps(seqs, rooms, drafts)
        if quick is not None:
            self._compare(quick, drafts)
        return drafts

    def _take_all_back(self, seqs: Iterable[Sequence], before: SequenceOf[tuple[int, int]]) -> None:
        """Go back to these numbers of tokens, and of those with K/V."""
        for seq, (num_known, num_computed) in zip(seqs, before):
            self._take_back(seq, num_known, num_computed)

    def _take_back(self, seq: Sequence, num_tokens: int, num_computed: int) -> None:
        """Go back to so many tokens."""
        del seq.token_ids[num_tokens:]
        seq.num_computed_tokens = num_computed
        self._manager.crop(seq.seq_id, num_computed)

    # -- all tokens of a draft in one native call ---------------------------------------------------------------

    def _find_loop(self) -> DraftLoop | None:
        """The loop for the model as it is now. None: it has none, or has not yet run as it needs to be."""
        if self._weights() != self._computed_with:  # the layers of a loop are those of the last packed step
            self._loop, self._is_trusted, self._attempts = None, False, self.ATTEMPTS
            return None
        if self._loop is None and self._attempts and len(self._manager.groups) == 1 and self._is_rotated_alike:
            self._attempts -= 1
            self._loop = DraftLoop.of(self._model)
        return None if torch.is_autocast_enabled("cpu") else self._loop

    def _weights(self) -> tuple[int, int]:
        """Another value after the model has changed, as of the last look."""
        weights = state_of(self._model).weights
        return weights.epoch, weights.code

    def _draft_in_loop(
        self,
        loop: DraftLoop,
        seqs: Mapping[int, Sequence],
        before: SequenceOf[tuple[int, int]],
        rooms: SequenceOf[int],
    ) -> dict[int, list[int]] | None:
        """The drafts; None, and nothing has changed, if the first step is too long or blocks are short. before: tokens
        of each sequence, and those with K/V."""
        # The last drafted token is not computed, because nothing follows it.
        steps = max(rooms[index] for index in seqs) - 1
        own = {seq.seq_id for seq in seqs.values()}
        counts, longest = [known - computed for known, computed in before], max(known for known, _ in before) + steps
        if not loop.takes(self._memory, counts, longest):
            return None
        for seq, (known, computed) in zip(seqs.values(), before):
            if not self._append(seq, known - computed + steps, own):
                self._take_all_back(seqs.values(), before)
                return None
        rows, logprobs = loop.draft(
            self._memory,
            [seq.seq_id for seq in seqs.values()],
            [computed for _, computed in before],
            [seq.token_ids[computed:] for seq, (_, computed) in zip(seqs.values(), before)],
            steps,
            self._least,
        )
        drafts = {}
        for row, (index, seq) in enumerate(seqs.items()):
            likely = itertools.takewhile(
                lambda pair: pair[1] >= self._least, ((t[row], p[row]) for t, p in zip(rows, logprobs))
            )
            drafts[index] = [token for token, _ in likely][: rooms[index]]
            # Unlikely tokens are computed too. They stay, because the engine's next tokens may be the same.
            seq.token_ids += [tokens[row] for tokens in rows[:-1]]
            # The loop may have ended early, with slots for tokens that it has not computed.
            self._take_back(seq, len(seq.token_ids), len(seq.token_ids))
        return drafts

    def _without_prompts(self, loop: DraftLoop, seqs: dict[int, Sequence]) -> dict[int, Sequence]:
        """Compute all tokens but the last one where these are too many for the loop. Returns the sequences of which no
        more are left than it takes."""
        long = {i: seq for i, seq in seqs.items() if not loop.takes_tokens(seq.num_uncomputed_tokens)}
        if not long:
            return seqs
        plan = self._append_uncomputed(long, {seq.seq_id for seq in seqs.values()}, but=1)
        if plan:
            self._compute([(long[i], count) for i, count in plan.items()])
        return {i: seq for i, seq in seqs.items() if i not in long or seq.num_uncomputed_tokens == 1}

    def _compare(self, quick: Mapping[int, list[int]], drafts: SequenceOf[list[int]]) -> None:
        """Trust the loop if it has drafted what the model's own steps have; else do without it."""
        pairs = [(a, b) for index, draft in quick.items() for a, b in zip(draft, drafts[index])]
        if pairs:
            self._is_trusted = sum(a == b for a, b in pairs) >= self.ALIKE * len(pairs)
            if not self._is_trusted:
                self._loop, self._attempts = None, 0

    # -- one forward for each token ------------------------------------------------------------------------------

    def _draft_in_steps(self, seqs: Mapping[int, Sequence], rooms: SequenceOf[int], drafts: list[list[int]]) -> None:
        own = {seq.seq_id for seq in seqs.values()}
        plan = self._append_uncomputed(seqs, own)
        while plan:
            chosen = self._compute([(seqs[index], count) for index, count in plan.items()])
            going, plan = plan, {}
            for index in going:
                seq, draft = seqs[index], drafts[index]
                if (token := chosen.get(seq)) is not None:
                    draft.append(token)
                    if len(draft) < rooms[index] and self._append(seq, 1, own):
                        seq.token_ids.append(token)
                        plan[index] = 1

    def go_back(self, seq_id: int, num_tokens: int) -> None:
        """See `Revisable`."""
        followed = self._followed.get(seq_id)
        if followed is None or followed.num_known <= num_tokens:
            return
        followed.num_known = num_tokens
        if self._manager.drops_blocks:  # those behind a window may have gone
            self._manager.free(self._followed.pop(seq_id).seq.seq_id)

    def _follow(self, wanted: Wanted) -> Sequence:
        """The sequence with the engine's tokens. Drafted tokens that are not among them lose their K/V."""
        manager, new = self._manager, wanted.token_ids
        followed = self._followed.get(wanted.seq_id)
        if followed is None:
            seq = SequenceGroup(str(wanted.seq_id), new).sequences[0]
            manager.adopt(seq.seq_id, [()] * len(manager.groups), 0)
            followed = self._followed[wanted.seq_id] = _Followed(seq, 0)
        self._followed.move_to_end(wanted.seq_id)
        # Tokens that the engine has given before do not change but by `go_back`, so only later ones are compared.
        seq, same = followed.seq, followed.num_known
        while same < min(len(seq.token_ids), len(new)) and seq.token_ids[same] == new[same]:
            same += 1
        # At least the last token is computed again: a draft begins with its logits.
        seq.num_computed_tokens = min(seq.num_computed_tokens, same, len(new) - 1)
        manager.crop(seq.seq_id, seq.num_computed_tokens)
        if manager.drops_blocks:  # no later call goes back behind the engine's tokens
            manager.drop_unseen(seq.seq_id)
        seq.token_ids[followed.num_known :] = new[followed.num_known :]
        followed.num_known = len(new)
        return seq

    def _append_uncomputed(self, seqs: Mapping[int, Sequence], kept: set[int], *, but: int = 0) -> dict[int, int]:
        """Append slots for the uncomputed tokens of each sequence but its last ones, `but` in number, as far as the
        budget and the blocks go. Returns how many tokens to compute, by the keys of `seqs`."""
        budget, plan = self._token_budget, {}
        for index, seq in seqs.items():
            count = min(seq.num_uncomputed_tokens - but, budget)
            if count and self._append(seq, count, kept):
                plan[index] = count
                budget -= count
        return plan

    def _append(self, seq: Sequence, count: int, kept: set[int]) -> bool:
        """Append slots. Sequences that are not in `kept` lose their blocks, if necessary."""
        # Those that were asked for longest ago lose their blocks first; those of this call are needed now.
        while self._manager.append_if_room([(seq.seq_id, count)]) is None:
            oldest = next((key for key, each in self._followed.items() if each.seq.seq_id not in kept), None)
            if oldest is None:
                return False
            self._manager.free(self._followed.pop(oldest).seq.seq_id)
        return True

    def _compute(self, plan: Plan) -> dict[Sequence, int]:
        """The next token of each sequence whose tokens are all computed then, if it is likely enough."""
        # Read before: layers that change during the step are found by the next look, and are not those that have run.
        weights = self._weights()
        result = self._runner.run(SchedulerOutput(scheduled=plan))
        self._computed_with = weights
        for seq, count in plan:
            seq.num_computed_tokens += count
        if result.logits is None:
            return {}
        tokens, logprobs = (column.tolist() for column in greedy(result.logits))
        chosen = zip(result.seqs, tokens, logprobs)
        return {seq: token for seq, token, logprob in chosen if logprob >= self._least}

    def _forget(self) -> None:
        """Free the blocks of all sequences. An interrupt may have left some that `_followed` does not name."""
        for seq_id in self._manager.seq_ids:
            self._manager.free(seq_id)
        self._followed.clear()

    def close(self) -> None:
        """Free the memory."""
        self._forget()
        self._runner.close()
        self._memory.release()
