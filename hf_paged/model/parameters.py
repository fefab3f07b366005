"""Find the weights that may be read by address: plain parameters of a layer.

A layer computes with what its forward reads, `layer.weight`. Usually that is a parameter. It is another tensor where
the name is also an attribute of the object, which a hook computes before each call (pruning, `weight_norm`), or a
property of its class (parametrizations). And a parameter may be of a class that decides itself what is computed with
it (quantised weights, DTensor). In these cases only the layer's own forward computes what the model computes.
"""

from __future__ import annotations

import torch
from torch import nn

from hf_paged.kernels.buffers import has_memory


def is_parameter(module: nn.Module, name: str) -> bool:
    """Return True if the name finds a parameter (or None), and no attribute of the object or class hides it."""
    return name in module._parameters and name not in vars(module) and not hasattr(type(module), name)


def readable(module: nn.Module, *names: str) -> list[nn.Parameter | None] | None:
    """The parameters that the module reads under these names, None for one that is None (`bias=None`).

    None altogether if one of them must not be read by its address: it is computed, or of a class of its own.
    """
    if not all(is_parameter(module, name) for name in names):
        return None
    found = [module._parameters[name] for name in names]
    return found if all(each is None or has_memory(each) for each in found) else None


def readable_weight(module: nn.Module) -> nn.Parameter | None:
    """The weight of a layer, if it has one that may be read by its address."""
    found = readable(module, "weight")
    return None if found is None else found[0]


def uses_of_memory(tensor: torch.Tensor) -> int:
    """The number of tensors, arrays and other objects that use its memory."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    # Without the storage object that was just made.
    return count - 1
