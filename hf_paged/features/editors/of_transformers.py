"""Editors of transformers' processors: the table of `registry.EDITORS`. Knows processors and tokens; never logits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, Self

import numpy as np
import torch
from transformers.generation import logits_process

from hf_paged.generation.sampling.editors import Editor, on_host
from hf_paged.generation.sampling.edits import Edit, Ids, Op
from hf_paged.integration.names import EDITS_ARE_KNOWN


class _Stateless:
    """An editor that looks at the tokens anew each time."""

    def fork(self) -> Self:
        return self


_ALWAYS = range(sys.maxsize)


class _Fixed(_Stateless):
    """One and the same edit, where the number of tokens is among `lengths`."""

    def __init__(self, edit: Edit, lengths: range = _ALWAYS) -> None:
        self._edit = edit
        self._lengths = lengths

    def edit(self, token_ids: Sequence[int]) -> Edit | None:
        return self._edit if len(token_ids) in self._lengths else None


class _Seen:
    """A penalty for the tokens from position `start` on."""

    def __init__(self, penalty: float, start: int, width: int) -> None:
        self._penalty = penalty
        self._known = start  # tokens below this position have been looked at
        self._is_seen = np.zeros(width, dtype=np.bool_)
        self._ids = np.empty(0, dtype=np.int64)
        self._count = 0

    def edit(self, token_ids: Sequence[int]) -> Edit | None:
        new = dict.fromkeys(token_ids[self._known :])
        fresh = [token for token in new if token < len(self._is_seen) and not self._is_seen[token]]
        if fresh:
            end = self._count + len(fresh)
            if end > len(self._ids):
                # Doubled, so that each token is copied a constant number of times.
                self._ids = np.concatenate([self._ids, np.empty(max(64, end), dtype=np.int64)])
            self._ids[self._count : end] = fresh
            self._is_seen[fresh] = True
            self._count = end
        self._known = max(self._known, len(token_ids))
        # A view: later tokens are written behind it.
        return Edit(Op.SCALE, self._ids[: self._count], None, self._penalty) if self._count else None

    def fork(self) -> Self:
        other = copy(self)
        other._is_seen, other._ids = self._is_seen.copy(), self._ids.copy()
        return other


class _NGrams:
    """Bans the tokens that would complete an n-gram of the text once more."""

    def __init__(self, size: int, width: int) -> None:
        self._size = size
        self._width = width
        self._known = 0  # n-grams that begin below this position are in the table
        self._followers: dict[tuple[int, ...], tuple[int, ...]] = {}  # all different

    def edit(self, token_ids: Sequence[int]) -> Edit | None:
        end = len(token_ids) - self._size + 1
        if end <= 0:
            return None
        for start in range(self._known, end):
            *prefix, token = token_ids[start : start + self._size]
            followers = self._followers.get(tuple(prefix), ())
            if token < self._width and token not in followers:
                self._followers[tuple(prefix)] = (*followers, token)
        self._known = end
        found = self._followers.get(tuple(token_ids[len(token_ids) + 1 - self._size :]))
        return Edit(Op.FILL, _ids(found)) if found else None

    def fork(self) -> Self:
        other = copy(self)
        other._followers = self._followers.copy()
        return other


class _SourceNGrams(_Stateless):
    """Bans the tokens that would complete an n-gram of the prompt, which `table` has by its first n - 1 tokens."""

    def __init__(self, table: dict[tuple[int, ...], list[int]], size: int) -> None:
        self._edits = {prefix: Edit(Op.FILL, _ids(dict.fromkeys(tokens))) for prefix, tokens in table.items()}
        self._size = size

    def edit(self, token_ids: Sequence[int]) -> Edit | None:
        return self._edits.get(tuple(token_ids[len(token_ids) + 1 - self._size :]))


class _Bias(_Stateless):
    """Biases of tokens, and of tokens that would complete a sequence.

    The biases of a token are added up in the order and the precision (fp32) of transformers. A score of -0.0 without a
    bias stays what it is; transformers makes it 0.0, which is equal.
    """

    def __init__(self, sequence_bias: dict[tuple[int, ...], float]) -> None:
        singles = {int(key[0]): bias for key, bias in sequence_bias.items() if len(key) == 1}
        self._ids = _ids(singles)
        self._values = np.array(list(singles.values()), dtype=np.float32)
        self._place = {token: place for place, token in enumerate(singles)}
        self._single = Edit(Op.ADD, self._ids, self._values) if singles else None
        # By length of the prefix, then by the prefix: tokens that complete it, and the biases.
        self._longer: dict[int, dict[tuple[int, ...], list[tuple[int, np.float32]]]] = {}
        for key, bias in sequence_bias.items():
            *prefix, token = map(int, key)
            if prefix:
                same_length = self._longer.setdefault(len(prefix), {})
                same_length.setdefault(tuple(prefix), []).append((token, np.float32(bias)))

    def edit(self, token_ids: Sequence[int]) -> Edit | None:
        total: dict[int, np.float32] = {}
        for length, prefixes in self._longer.items():
            found = prefixes.get(tuple(token_ids[-length:]), ()) if length <= len(token_ids) else ()
            for token, bias in found:
                with np.errstate(invalid="ignore"):  # inf - inf
                    total[token] = self._start(token) if token not in total else total[token]
                    total[token] = total[token] + bias
        if not total:
            return self._single
        kept = np.array([token not in total for token in self._place], dtype=np.bool_)
        ids = np.concatenate([self._ids[kept], _ids(total)])
        values = np.concatenate([self._values[kept], np.array(list(total.values()), dtype=np.float32)])
        return Edit(Op.ADD, ids, values)

    def _start(self, token: int) -> np.float32:
        place = self._place.get(token)
        return np.float32(0) if place is None else self._values[place]


class _Decay(_Stateless):
    """A bonus for the EOS tokens that grows with each token beyond `start`."""

    def __init__(self, ids: Ids, start: int, factor: float) -> None:
        self._ids = ids
        self._start = start
        self._factor = factor

    def edit(self, token_ids: Sequence[int]) -> Edit | None:
        beyond = len(token_ids) - self._start
        return Edit(Op.GROW, self._ids, None, pow(self._factor, beyond) - 1) if beyond > 0 else None


class _Watermark(_Stateless):
    """A bias for the tokens of a list that the last tokens determine."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def edit(self, token_ids: Sequence[int]) -> Edit | None:
        if len(token_ids) < self._processor.context_width:
            return None
        context = torch.tensor(token_ids[-self._processor.context_width :], dtype=torch.int64, device="cpu")
        ids = self._processor._get_greenlist_ids(context).numpy()
        return Edit(Op.ADD, ids, np.full(len(ids), self._processor.bias, dtype=np.float32))


# -- one for each type ---------------------------------------------------------------------------------------------


def _ids(tokens: Iterable[int]) -> Ids:
    return np.fromiter(tokens, dtype=np.int64)


def _listed(tensor: Any) -> list[int] | None:
    """The different ids in a tensor of integers."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return None
    return list(dict.fromkeys(on_host(tensor).reshape(-1).tolist()))


def _banned(tensor: Any, width: int, lengths: range = _ALWAYS) -> Editor | None:
    """FILL of the ids in the tensor; transformers leaves out those that are not in the vocabulary."""
    tokens = _listed(tensor)
    if tokens is None:
        return None
    return _Fixed(Edit(Op.FILL, _ids(token for token in tokens if 0 <= token < width)), lengths)


def _all_within(tokens: Iterable[int] | None, width: int) -> bool:
    """Return True if all ids index into `width` scores. For others, transformers raises an error of its own."""
    return tokens is not None and all(0 <= token < width for token in tokens)


def _forced(tokens: list[int] | None, width: int, at: int) -> Editor | None:
    if tokens is None or not _all_within(tokens, width):
        return None
    return _Fixed(Edit(Op.FORCE, _ids(tokens)), range(at, at + 1))


def _forced_bos(processor: Any, width: int) -> Editor | None:
    token = processor.bos_token_id
    return _forced([token], width, 1) if type(token) is int else None


def _repetition(processor: Any, width: int) -> Editor | None:
    start = getattr(processor, "prompt_ignore_length", None)
    if isinstance(start, torch.Tensor):
        start = on_host(start)
        if len(set(start.tolist())) != 1:  # it has one for each row of the request
            return None
        start = int(start[0])
    return _Seen(processor.penalty, start or 0, width)


def _source_repetition(processor: Any, width: int) -> Editor | None:
    prompts = processor.encoder_input_ids
    tokens = _listed(prompts)
    if tokens is None or not _all_within(tokens, width) or len(set(map(tuple, on_host(prompts).tolist()))) != 1:
        return None
    return _Fixed(Edit(Op.SCALE, _ids(tokens), None, processor.penalty))


def _source_no_repeat_ngram(processor: Any, width: int) -> Editor | None:
    tables = processor.generated_ngrams
    if any(table != tables[0] for table in tables) or not all(_all_within(t, width) for t in tables[0].values()):
        return None
    return _SourceNGrams(tables[0], processor.ngram_size)


def _bias(processor: Any, width: int) -> Editor | None:
    tokens = [int(token) for key in processor.sequence_bias for token in key]
    return _Bias(processor.sequence_bias) if _all_within(tokens, width) else None


def _decay(processor: Any, width: int) -> Editor | None:
    tokens, start, factor = _listed(processor.eos_token_id), processor.regulation_start, processor.regulation_factor
    if tokens is None or not _all_within(tokens, width) or type(start) is not int or type(factor) is not float:
        return None
    return _Decay(_ids(tokens), start, factor)


def _watermark(processor: Any, width: int) -> Editor | None:
    """The scheme "selfhash" depends on the scores, and the random numbers of a GPU are not those of the host."""
    is_usable = processor.seeding_scheme == "lefthash" and processor.fixed_table.device.type == "cpu"
    return _Watermark(processor) if is_usable and processor.vocab_size <= width else None


EDITORS: dict[type, Callable[[Any, int], Editor | None]] = {
    logits_process.MinLengthLogitsProcessor: lambda p, width: _banned(p.eos_token_id, width, range(p.min_length)),
    logits_process.MinNewTokensLengthLogitsProcessor: lambda p, width: _banned(
        p.eos_token_id, width, range(p.prompt_length_to_skip + p.min_new_tokens)
    ),
    logits_process.SuppressTokensLogitsProcessor: lambda p, width: _banned(p.suppress_tokens, width),
    logits_process.SuppressTokensAtBeginLogitsProcessor: lambda p, width: _banned(
        p.begin_suppress_tokens, width, range(p.begin_index, p.begin_index + 1)
    ),
    logits_process.ForcedBOSTokenLogitsProcessor: _forced_bos,
    logits_process.ForcedEOSTokenLogitsProcessor: lambda p, width: _forced(
        _listed(p.eos_token_id), width, p.max_length - 1
    ),
    logits_process.RepetitionPenaltyLogitsProcessor: _repetition,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor: _source_repetition,
    logits_process.NoRepeatNGramLogitsProcessor: lambda p, width: _NGrams(p.ngram_size, width),
    logits_process.EncoderNoRepeatNGramLogitsProcessor: _source_no_repeat_ngram,
    logits_process.SequenceBiasLogitsProcessor: _bias,
    logits_process.NoBadWordsLogitsProcessor: _bias,
    logits_process.ExponentialDecayLengthPenalty: _decay,
    logits_process.WatermarkLogitsProcessor: _watermark,
}
if not EDITS_ARE_KNOWN:  # transformers' own processors run then, for each request alone
    for _kind in (
        logits_process.RepetitionPenaltyLogitsProcessor,
        logits_process.SequenceBiasLogitsProcessor,
        logits_process.NoBadWordsLogitsProcessor,
        logits_process.ExponentialDecayLengthPenalty,
    ):
        del EDITORS[_kind]
