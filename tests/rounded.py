"""A cache of transformers whose K/V is rounded as K/V in eight bits is: what hf_paged's calls are compared with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from hf_paged.kernels.quantised import Storage, read_back, storage_of


class RoundedCache(DynamicCache):
    """Attention reads K and V back as they are stored, those of the tokens of its own forward too."""

    def __init__(self, model: Any, key_dtype: str | None, value_dtype: str | None) -> None:
        super().__init__(config=model.config)
        self.storage: Storage = storage_of(key_dtype, value_dtype)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(*read_back(key_states, value_states, self.storage), *args, **kwargs)
