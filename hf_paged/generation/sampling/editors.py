"""Editors: what processors change in the scores of one sequence, worked out on the host. Finds a processor's editor.

An editor is made once for a request. What depends on the vocabulary only is made with it; what depends on the tokens
is kept up to date by the new ones. Knows processors and tokens; never logits.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, Self, TypeGuard

import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers.generation import logits_process

from hf_paged.generation.sampling.edits import Edit
from hf_paged.registry import EDITORS


class OwnProcessor(logits_process.LogitsProcessor):
    """A processor of ours, which treats each row as if it were alone, and has an editor."""

    def at(self, start: int) -> Self:
        """Return one like this for a request of its own, whose prompt has `start` tokens."""
        raise NotImplementedError

    def editor(self, width: int) -> Editor | None:
        """Return its editor of `width` scores, None before `at`."""
        raise NotImplementedError


def is_own(processor: object) -> TypeGuard[OwnProcessor]:
    """Return True if the processor is ours, and not of a subclass, which may do anything."""
    return isinstance(processor, OwnProcessor) and type(processor).__module__.startswith("hf_paged.")


class Editor(Protocol):
    """One processor of one request."""

    def edit(self, token_ids: Sequence[int]) -> Edit | None:
        """The change after these tokens, prompt included; None if there is none. Successive calls pass
        extensions of one sequence."""

    def fork(self) -> Editor:
        """An editor for a text that begins like this one and continues differently. They share what does not change."""


def editor_of(processor: Any, width: int) -> Editor | None:
    """The editor that does what `processor` does to scores of `width` tokens. None if there is none for its type, which
    has to be transformers' own or ours, not a subclass, or for its settings."""
    if is_own(processor):
        return processor.editor(width)
    make = _of_transformers().get(type(processor))
    return None if make is None else make(processor, width)


@functools.cache
def _of_transformers() -> Mapping[type, Callable[[Any, int], Editor | None]]:
    found: Mapping[type, Callable[[Any, int], Editor | None]] = pkgutil.resolve_name(EDITORS)
    return found


# By identity, because comparing tensors would compare their elements, on the device.
_on_host: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()


def read_settings(processors: Iterable[Any]) -> None:
    """Copy the tensors that transformers' processors keep on a device, for which the host waits, so that `editor_of`,
    which is called in a step, does not wait."""
    of_transformers = _of_transformers()
    for processor in processors:
        if type(processor) in of_transformers:
            for value in vars(processor).values():
                if isinstance(value, torch.Tensor):
                    on_host(value)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it is on the host, else the copy that was first made of it."""
    if tensor.device.type == "cpu":
        return tensor
    if tensor not in _on_host:
        _on_host[tensor] = tensor.cpu()
    return _on_host[tensor]
