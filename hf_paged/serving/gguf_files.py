"""Reads GGUF files with their blocks as codes: names and orders of weights are transformers', values the file's own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_paged.fused.cpu import gguf_blocks
from hf_paged.fused.cpu.groups import Heads
from hf_paged.serving.gguf_header import Header, Tensor
from hf_paged.serving.stored_codes import Stored, load, summary, takes_codes

# Bytes of a file that are read together. What is made of a MiB takes 35 MiB for a moment.
_TOGETHER = 1 << 18


def load_in_codes(file: str, config: Any, loader: Any, dtype: torch.dtype, source: Any) -> tuple[Any, str] | str:
    """Load the model of a GGUF file, and say what is in codes; or why transformers must dequantise the file."""
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )
    except ImportError as error:
        return f"this version of transformers reads GGUF files in another way ({error})"
    header = Header(Path(file))
    if is_gguf_arch_supported(header.architecture):
        return f"transformers has a reader of its own for {header.architecture}"
    with torch.device("meta"):
        model = loader.from_config(config, dtype=dtype)
    kind: Any = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
    processor = kind(config=config.to_dict())
    found = _Weights(header, processor, get_gguf_hf_weights_map(model, processor))
    stored = found.stored(model)
    if not stored:
        return "no weight of a linear layer or an embedding is in blocks of a known type"
    loaded = load(type(model), config, dtype, found.plain(stored), stored)
    return loaded, f"{summary(stored)}; --weights dequantised makes plain ones"


class _Weights:
    """A file's weights. processor: of transformers, which undoes what llama.cpp did to them. names: transformers'
    names, by those of the file."""

    def __init__(self, header: Header, processor: Any, names: dict[str, str]) -> None:
        self._header, self._processor, self._names = header, processor, names

    def stored(self, model: Any) -> dict[str, Stored]:
        """Return the weights that can be in codes as they lie in the file, but for the order of their rows."""
        found = {}
        for each in self._header.tensors:
            name, block = self._names.get(each.name), gguf_blocks.BLOCKS.get(each.kind)
            if name is None or block is None or not takes_codes(model, name, each.shape):
                continue
            if (order := self._order(each)) is not None:
                columns, depth = each.shape
                found[name] = Stored(each.kind, columns, depth, block.form, partial(self._pieces, each, order))
        return found

    def plain(self, stored: dict[str, Stored]) -> dict[str, torch.Tensor]:
        """Return all other weights, as transformers reads them."""
        from gguf import GGMLQuantizationType, dequantize

        state: dict[str, Any] = {}
        for each in self._header.tensors:
            if self._names.get(each.name) not in stored:
                values = dequantize(self._header.rows(each), GGMLQuantizationType[each.kind])
                found = self._process(each.name, values, state)
                if found.name in self._names:
                    state[self._names[found.name]] = torch.from_numpy(np.copy(found.weights))
                self._header.forget()
        return state

    def _process(self, name: str, values: Any, state: dict[str, Any]) -> Any:
        parsed = {"tensors": state}
        return self._processor.process(
            weights=values, name=name, tensor_key_mapping=self._names, parsed_parameters=parsed
        )

    def _order(self, tensor: Tensor) -> Any:
        """The rows of the file in the model's order: int64 [rows]; None if the model has something else."""
        numbers = [np.arange(size, dtype=np.float32) for size in tensor.shape]
        seen: list[Any] = []
        for probe in (numbers[0][:, None], numbers[1]):
            state: dict[str, Any] = {}
            try:
                # The probe has no memory, but where rows change places.
                found = self._process(tensor.name, np.broadcast_to(probe, tensor.shape), state)
            # Code of transformers that gets another weight than it expects, where any error is possible.
            except Exception:
                return None
            if found.name != tensor.name or found.weights.shape != tensor.shape or state:
                return None
            seen.append(found.weights)
        rows = seen[0][:, 0]
        moves_rows = (seen[0] == rows[:, None]).all() and (np.sort(rows) == numbers[0]).all()
        return rows.astype(np.int64) if moves_rows and (seen[1] == numbers[1]).all() else None

    def _pieces(self, tensor: Tensor, order: Any) -> Iterator[tuple[int, torch.Tensor, Heads]]:
        rows = self._header.rows(tensor)
        # Whole panels of the kernels.
        step = max(_TOGETHER // tensor.row // 16, 1) * 16
        for first in range(0, len(rows), step):
            yield first, *gguf_blocks.read(torch.from_numpy(rows[order[first : first + step]]), tensor.kind)
            self._header.forget()
