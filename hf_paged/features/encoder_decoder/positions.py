"""Find by trial how many positions an encoder-decoder model has.

Some tables of positions grow, others do not, and neither names nor configs tell which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.features.encoder_decoder.encoder_decoder import TrialRows
from hf_paged.model.packed import uncompiled
from hf_paged.model.support import Positions
from hf_paged.model.trial import Refusal, attempt


class _Inside(BaseException):
    """The position is in its table. (No handler of the model's stops it.)"""


class _Outside(BaseException):
    """excess: by how many rows the table would have to be longer, less one."""

    def __init__(self, excess: int) -> None:
        super().__init__(excess)
        self.excess = excess


class _Lookups(TorchFunctionMode):
    """Raises _Outside before a table is read beyond its end: a GPU would end the process. last: ends the forward too
    when a number from `last` on is looked up; no token may be as large."""

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self._last = last

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        table: Any = None
        index: Any = None
        if func is nn.functional.embedding:
            index, table = (args[at] if len(args) > at else kwargs[name] for at, name in enumerate(("input", "weight")))
        elif func in (torch.Tensor.index_select, torch.index_select):
            table, index = args[0], args[2] if len(args) > 2 else kwargs["index"]
        elif func is torch.Tensor.__getitem__:
            table, index = args
        if _is_lookup(table, index):
            highest = int(index.max())
            if highest >= table.shape[0]:
                raise _Outside(highest - table.shape[0])
            if self._last is not None and highest >= self._last:
                raise _Inside
        return func(*args, **kwargs)


def _is_lookup(table: Any, index: Any) -> bool:
    """Return True if rows of a floating-point table are read by integer indices."""
    if not isinstance(table, torch.Tensor) or not isinstance(index, torch.Tensor) or not index.numel():
        return False
    return table.ndim == 2 and table.is_floating_point() and index.dtype in (torch.int64, torch.int32)


def find_positions(model: Model, given: dict[str, Any], *, gathers: bool) -> Positions:
    """given: inputs of a forward that the model has computed on packed rows. gathers: as for EncoderDecoderModel."""
    decoder = model.config.get_text_config(decoder=True)
    encoder = getattr(model.get_encoder(), "config", model.config).get_text_config(encoder=True)
    pads = {getattr(config, "pad_token_id", None) for config in (model.config, decoder, encoder)}
    # Some tables do not count padding, so the token must be none.
    token = next(token for token in range(len(pads) + 1) if token not in pads)
    with _unchanged(model):
        text = None
        if model.main_input_name == "input_ids":
            text = _limit(partial(_encodes, model, token), _candidates(model, encoder))
        return Positions(_limit(partial(_decodes, model, given, token, gathers), _candidates(model, decoder)), text)


def _candidates(model: Model, config: Any) -> list[int]:
    """Numbers that may be those of positions, from the smallest: what the config says of them, if a table has about as
    many rows, and these rows."""
    modules = (module for module in model.modules() if not isinstance(module, nn.Linear))
    tensors = [each for module in modules for each in (*module._parameters.values(), *module._buffers.values())]
    rows = {each.shape[0] for each in tensors if each is not None and each.ndim == 2}
    named = {value for name, value in vars(config).items() if "position" in name and type(value) is int}
    # Tables have a few rows more than positions: OPT's begin at 2. Below 5, a number may be anything.
    pairs = {(value, count) for value in named for count in rows if value > 4 and 0 <= count - value <= 8}
    return sorted({number for pair in pairs for number in pair})


def _limit(computes: Callable[[int], bool], candidates: Iterable[int]) -> int | None:
    """The number of positions. computes: tries a token at this position, and may raise _Outside."""
    for limit in candidates:
        try:
            if computes(limit):
                continue
        except _Outside:
            pass
        # A model may read several positions for one token.
        for _ in range(4):
            try:
                if computes(limit - 1):
                    return limit
                break
            except _Outside as outside:
                limit -= 1 + outside.excess
    return None


def _encodes(model: Model, token: int, position: int) -> bool:
    """Ends at the lookup: a long text takes long."""
    ids = torch.full((1, position + 1), token, dtype=torch.int64, device=model.device)
    try:
        with _Lookups(position):
            encoder = uncompiled(model.get_encoder())
            # One that fails takes its positions in another way.
            return not isinstance(attempt(lambda: encoder(input_ids=ids, attention_mask=torch.ones_like(ids))), Refusal)
    except _Inside:
        return True


def _decodes(model: Model, given: dict[str, Any], token: int, gathers: bool, position: int) -> bool:
    """A step at `position` over the K/V of one token: positions do not depend on what attention reads."""
    ids = given["decoder_input_ids"]
    given = {**given, "decoder_input_ids": ids.new_full((len(ids), position + 1), token)}
    rows = TrialRows(model, given, PagedMemory(2, growable=True), gathers=gathers)
    rows.first(1)
    rows.packed.cache.own.length = position
    with _Lookups():
        # A row's K/V is gathered at its end.
        logits = attempt(lambda: rows.later(position, position - 1 if gathers else 0))
    return not isinstance(logits, Refusal) and logits.shape[1] == 1


@contextmanager
def _unchanged(model: Model) -> Iterator[None]:
    """Afterwards the modules have the tensors that they have now: tables may grow when they are read."""
    held = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, parameters, buffers in held:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
