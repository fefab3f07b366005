"""DraftingDecoder: a PackedDecoder that computes guesses of a row's next tokens together with its last one.

Transformers' loop runs token by token: as long as a row's next token is the drafted one, its logits are there
already. So processors, criteria, random numbers and results are those of the loop without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_paged.config import LOOKUP_NGRAM, SchedulerConfig
from hf_paged.errors import OutOfBlocks
from hf_paged.features.speculation.draft_model import ModelDrafter, close_drafter, translated
from hf_paged.features.speculation.drafts import Drafter, Lookup, Wanted
from hf_paged.generation.decoder import PackedDecoder
from hf_paged.generation.obstacles import Asked, call_obstacle
from hf_paged.generation.validation import check_draft_lengths
from hf_paged.integration.names import CACHE
from hf_paged.sockets import Executor, Parts

MOST = 20
"""`num_assistant_tokens`, where no config has one: as in transformers."""


def check_drafts(config: Any) -> None:
    """Raises ValueError for options of an assisted call that rows of a batch do not have, and for wrong lengths."""
    for name in ("use_mtp", "assistant_early_exit", "assistant_ensemble_weight", "speculation_type", "dola_layers"):
        if (value := getattr(config, name, None)) is not None and value is not False:
            raise ValueError(f"{name}={value!r}: not for several prompts at once; give one, or leave it out")
    check_draft_lengths(vars(config))


class DraftingDecoder(PackedDecoder):
    """Invariant between forwards beside that of a PackedDecoder: `ahead` has, for some sequences, the tokens that were
    drafted and have K/V after those of the loop, each with the logits after it. Its memory has one group."""

    one_group = True

    @classmethod
    def takes(cls, asked: Asked) -> bool:
        """Several rows draft in transformers' loop for single tokens."""
        return asked.mode == "assisted_generation" and asked.num_prompts > 1 and not asked.report.has_encoder

    @classmethod
    def obstacle(cls, asked: Asked) -> str | None:
        check_drafts(asked.config)
        if (obstacle := call_obstacle(replace(asked, mode="sample"))) is not None:
            return obstacle
        if not asked.report.native:
            return asked.report.reason
        return None if asked.cache is None else f"{CACHE} is given"

    @classmethod
    def fall_back(cls, obstacle: str) -> None:
        raise ValueError(
            f"assistant_model, prompt_lookup_num_tokens: {obstacle}, so that several prompts cannot draft at once; "
            "give one prompt, or leave them out"
        )

    def __init__(self, executor: Executor, asked: Asked, **options: Any) -> None:
        super().__init__(executor, asked, **options)
        self._config = asked.config
        self._drafter: Drafter | None = None
        self._ahead: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._texts: dict[int, list[int]] = {}  # the tokens of each sequence
        self._lengths: dict[int, int] = {}  # of the next draft

    def begin(self, assistant: Any, num_rows: int, *, tokenizer: Any = None, own_tokenizer: Any = None) -> None:
        """Draft by this model, or from the rows' own tokens, which have precedence, as in transformers. own_tokenizer:
        the model's, if it has another one: transformers has compared the sizes of both vocabularies."""
        config = self._config
        if config.prompt_lookup_num_tokens is not None:
            ngram = config.max_matching_ngram_size or LOOKUP_NGRAM
            self._most, self._is_constant = config.prompt_lookup_num_tokens, True
            self._drafter = Lookup(self._most, ngram)
            return
        own = assistant.generation_config
        check_draft_lengths(vars(own))
        self._most = own.num_assistant_tokens or MOST
        self._is_constant = own.num_assistant_tokens_schedule in (None, "constant")
        size, rows = self.memory.block_size, num_rows
        blocks = rows * (-(-(config.max_length + self._most) // size) + 1)
        drafter = ModelDrafter(assistant, blocks, size, SchedulerConfig(max_num_seqs=rows))
        self._drafter = translated(drafter, tokenizer, own_tokenizer)

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        logits = super().prefill(input_ids, attention_mask)
        for row, tokens, padding in zip(self.rows, input_ids.tolist(), self.padding):
            assert row is not None
            self._texts[row], self._lengths[row] = tokens[padding:], self._most
        return logits

    def decode(self, input_ids: torch.Tensor) -> torch.Tensor:
        if not self.keep_finished:
            self._drop_finished()
        found: dict[int, torch.Tensor] = {}
        missing: list[int] = []
        for row, token in zip(self.rows, input_ids[:, -1].tolist()):
            if row is None:
                continue
            self._texts[row].append(token)
            ahead = self._ahead.get(row)
            if ahead and ahead[0][0] == token:
                found[row] = ahead.pop(0)[1]
            else:
                missing.append(row)
        if missing:
            found |= self._compute(missing, self._drafts_of(missing))
            self._report()
        self.length += 1
        some = next(iter(found.values()))
        return torch.stack([some.new_zeros(some.shape) if row is None else found[row] for row in self.rows])

    def _drafts_of(self, rows: Sequence[int]) -> list[list[int]]:
        """New drafts, after the rest of the last ones, which was wrong, has lost its K/V."""
        for row in rows:
            wrong = self._ahead.pop(row, None)
            if wrong is not None and not self._is_constant:
                self._lengths[row] = max(1, self._lengths[row] - 1) if wrong else self._lengths[row] + 2
            if wrong:
                self.memory.crop(row, len(self._texts[row]) - 1)
        room = self._config.max_length - self.length - 2  # one less than the loop still samples
        wanted = [Wanted(row, self._texts[row], min(self._lengths[row], room)) for row in rows]
        if self._drafter is None or room < 1:
            return [[] for _ in rows]
        return [list(draft) for draft in self._drafter.draft(wanted)]

    def _compute(self, rows: Sequence[int], drafts: list[list[int]]) -> dict[int, torch.Tensor]:
        """The logits [vocab] after the last token of each of these sequences; those after its draft are kept."""
        try:
            self.memory.append([(row, 1 + len(draft)) for row, draft in zip(rows, drafts)])
        except OutOfBlocks:
            drafts = [[] for _ in rows]
            self.memory.append([(row, 1) for row in rows])
        counts = [1 + len(draft) for draft in drafts]
        tokens = [token for row, draft in zip(rows, drafts) for token in (self._texts[row][-1], *draft)]
        starts = [len(self._texts[row]) - 1 for row in rows]
        # Without drafts it is a decode step, whose arrays follow those of the last one.
        parts = Parts(list(rows), starts, tokens, counts if any(drafts) else None)
        logits = self._run(parts).split(counts)
        self._ahead.update({row: list(zip(draft, own[1:])) for row, draft, own in zip(rows, drafts, logits)})
        return {row: own[0] for row, own in zip(rows, logits)}

    def returned_cache(self) -> Any:
        for row, ahead in self._ahead.items():
            if ahead:
                self.memory.crop(row, self.memory.manager.num_tokens(row) - len(ahead))
        self._ahead.clear()
        self._close_drafter()
        return super().returned_cache()

    def _free(self, seq_id: int) -> None:
        super()._free(seq_id)
        for own in (self._ahead, self._texts, self._lengths):
            own.pop(seq_id, None)

    def free(self) -> None:
        super().free()
        self._close_drafter()

    def _close_drafter(self) -> None:
        close_drafter(self._drafter)
        self._drafter = None
