"""Code that users put into models: each case returns what takes it out again."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

Undo = Callable[[], None]
PutIn = Callable[[Any], Undo]


def hidden_of(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else getattr(result, "logits", result)


def replaced(result: Any, hidden: torch.Tensor) -> Any:
    """The result of a module with other hidden states, or logits."""
    if isinstance(result, tuple):
        return (hidden, *result[1:])
    if hasattr(result, "logits"):
        result.logits = hidden
        return result
    return hidden


def vector(like: torch.Tensor) -> torch.Tensor:
    """A large vector [size] that a steered position gets."""
    return torch.linspace(-3, 3, like.shape[-1]).sin().mul(30).to(like)


def steer_last(hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden.clone()
    hidden[:, -1] += vector(hidden)
    return hidden


def add_mean(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + 2 * hidden.mean(1, keepdim=True).roll(1, -1)


def only_prompts(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + vector(hidden) if hidden.shape[1] > 1 else hidden


def only_steps(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + vector(hidden) if hidden.shape[1] == 1 else hidden


PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "layer": lambda model: model.get_decoder().layers[0],
    "attention": lambda model: model.get_decoder().layers[1].self_attn,
    "embedding": lambda model: model.get_input_embeddings(),
    # `generate` asks for the logits of the last position, so that a prompt looks like a step here.
    "head": lambda model: model.lm_head,
    "root": lambda model: model,
}


Change = Callable[[torch.Tensor], torch.Tensor]


def forward_hook(change: Change, place: str = "layer") -> PutIn:
    def hook(module: nn.Module, args: Any, result: Any) -> Any:
        return replaced(result, change(hidden_of(result)))

    return lambda model: PLACES[place](model).register_forward_hook(hook).remove


def pre_hook(model: Any) -> Undo:
    hook = PLACES["layer"](model).register_forward_pre_hook(lambda module, args: (add_mean(args[0]), *args[1:]))
    return hook.remove


def kwargs_hook(model: Any) -> Undo:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "hidden_states": only_steps(kwargs["hidden_states"])}

    return PLACES["attention"](model).register_forward_pre_hook(hook, with_kwargs=True).remove


def global_hook(model: Any) -> Undo:
    def hook(module: nn.Module, args: Any, result: Any) -> Any:
        return steer_last(result) if module is model.get_decoder().layers[0].mlp else None

    return nn.modules.module.register_module_forward_hook(hook).remove


def own_forward(change: Change) -> PutIn:
    def put_in(model: Any) -> Undo:
        mlp = model.get_decoder().layers[0].mlp
        own = mlp.forward
        mlp.forward = functools.wraps(own)(lambda hidden: change(own(hidden)))
        return lambda: delattr(mlp, "forward")

    return put_in


def class_forward(model: Any) -> Undo:
    patch, owner = pytest.MonkeyPatch(), type(model.get_decoder().layers[0].mlp)
    own = owner.forward
    patch.setattr(owner, "forward", functools.wraps(own)(lambda self, hidden: only_prompts(own(self, hidden))))
    return patch.undo


def code_of_class(model: Any) -> Undo:
    """Other code in the same function object."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * -2

    patch = pytest.MonkeyPatch()
    patch.setattr(type(model.get_decoder().layers[0].mlp).forward, "__code__", forward.__code__)
    return patch.undo


HOOKS: dict[str, PutIn] = {
    "steer_last on layer": forward_hook(steer_last), "only_prompts on layer": forward_hook(only_prompts),
    "add_mean on attention": forward_hook(add_mean, "attention"),
    "only_steps on embedding": forward_hook(only_steps, "embedding"),
    "steer_last on head": forward_hook(steer_last, "head"), "only_steps on root": forward_hook(only_steps, "root"),
    "pre-hook: add_mean": pre_hook, "with kwargs: only_steps": kwargs_hook, "on all modules: steer_last": global_hook,
    "forward: only_steps": own_forward(only_steps), "class: only_prompts": class_forward,
}  # fmt: skip


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: Any) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    is_causal = mask is None and query.shape[2] > 1
    out = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scaling)
    return out.transpose(1, 2).contiguous()


def window_attention(
    module: nn.Module, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **kwargs: Any
) -> Any:
    """A window of 8 tokens, which five tokens do not show."""
    q_len, k_len = query.shape[2], key.shape[2]
    where, back = torch.arange(q_len)[:, None] + k_len - q_len, torch.arange(k_len)
    seen = (back <= where) & (back > where - 8)
    if mask is not None:
        seen = seen & (mask if mask.dtype is torch.bool else mask >= 0)
    return _sdpa(query, key, value, seen, scaling), None


def log_attention(
    module: nn.Module, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **kwargs: Any
) -> Any:
    """Scaled by the logarithm of the length, beyond eight tokens."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _sdpa(query, key, value, mask, scaling * max(torch.tensor(key.shape[2] / 8).log().item() + 1, 1)), None


def window_mask(*args: Any, **kwargs: Any) -> Any:
    """Transformers' mask without what is eight tokens back or more."""
    mask = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
    q_len, k_len = mask.shape[-2:]
    return mask & (torch.arange(k_len) > torch.arange(q_len)[:, None] + k_len - q_len - 8)


def registered(function: Any, mask: Any = sdpa_mask) -> PutIn:
    """Under a name of its own."""

    def put_in(model: Any) -> Undo:
        own = model.config._attn_implementation
        ALL_ATTENTION_FUNCTIONS.register("users_own", function)
        ALL_MASK_ATTENTION_FUNCTIONS.register("users_own", mask)
        model.set_attn_implementation("users_own")

        def undo() -> None:
            model.set_attn_implementation(own)
            del AttentionInterface._global_mapping["users_own"]
            del AttentionMaskInterface._global_mapping["users_own"]

        return undo

    return put_in


def in_place_of(mapping: dict[str, Any], name: str, function: Any) -> PutIn:
    def put_in(model: Any) -> Undo:
        patch = pytest.MonkeyPatch()
        patch.setitem(mapping, name, function)
        return patch.undo

    return put_in


def eager_of_module(model: Any) -> Undo:
    own, space = model.config._attn_implementation, vars(sys.modules[type(model).__module__])
    undo = in_place_of(space, "eager_attention_forward", window_attention)(model)
    model.set_attn_implementation("eager")
    return lambda: (undo(), model.set_attn_implementation(own))  # type: ignore[func-returns-value]


def of_torch(model: Any) -> Undo:
    patch, own = pytest.MonkeyPatch(), nn.functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return own(query * 3, *args, **kwargs)

    patch.setattr(nn.functional, "scaled_dot_product_attention", attend)
    return patch.undo


def other_result(owner: Any, name: str, change: Callable[[Any], Any] = lambda out: out * 2, by: str = "") -> PutIn:
    """A function of torch, called by classes of this name if one is given, returns something else."""

    def put_in(model: Any) -> Undo:
        patch, own = pytest.MonkeyPatch(), getattr(owner, name)

        def function(first: Any, *args: Any, **kwargs: Any) -> Any:
            out = own(first, *args, **kwargs)
            return change(out) if type(first).__name__.endswith(by) else out

        patch.setattr(owner, name, function)
        return patch.undo

    return put_in


def centred(out: torch.Tensor) -> torch.Tensor:
    """For functions that no native code replaces: the result depends on the other tokens of a row."""
    return out - out.mean(1, keepdim=True) / 2 if out.dim() == 3 and out.is_floating_point() else out


def call_of(name: str, *, of_class: bool = False) -> PutIn:
    """What the call of an MLP goes through returns twice as much."""

    def put_in(model: Any) -> Undo:
        patch, mlp = pytest.MonkeyPatch(), model.get_decoder().layers[0].mlp
        own = getattr(type(mlp) if of_class else mlp, name) or mlp._call_impl
        patch.setattr(type(mlp) if of_class else mlp, name, lambda *args, **kwargs: 2 * own(*args, **kwargs))
        return patch.undo if of_class else functools.partial(delattr, mlp, name)

    return put_in


class DoublesActivations(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func.__name__ == "silu" else out


class DoublesDispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func.overloadpacket.__name__ == "silu" else out


def within(kind: type) -> PutIn:
    def put_in(model: Any) -> Undo:
        mode = kind()
        mode.__enter__()
        return functools.partial(mode.__exit__, None, None, None)

    return put_in


def in_one_layer(model: Any) -> Undo:
    """The config of one layer names another function."""
    attention = model.get_decoder().layers[1].self_attn
    shared, patch = attention.config, pytest.MonkeyPatch()
    patch.setitem(AttentionInterface._global_mapping, "users_own", window_attention)
    attention.config = copy.copy(shared)
    attention.config._attn_implementation_internal = "users_own"

    def undo() -> None:
        attention.config = shared
        patch.undo()

    return undo


def rotary_of_module(model: Any) -> Undo:
    space, patch = vars(sys.modules[type(model).__module__]), pytest.MonkeyPatch()
    own = space["apply_rotary_pos_emb"]

    def rotate(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        query, key = own(query, key, *args, **kwargs)
        return (query * 2 if query.shape[2] > 1 else query), key

    patch.setitem(space, "apply_rotary_pos_emb", functools.wraps(own)(rotate))
    return patch.undo


FUNCTIONS: dict[str, PutIn] = {
    "torch's linear": other_result(nn.functional, "linear"), "torch's silu": other_result(nn.functional, "silu"),
    "torch's rsqrt": other_result(torch, "rsqrt"), "tensors' pow": other_result(torch.Tensor, "pow"),
    "torch's embedding": other_result(nn.functional, "embedding", centred),
    "tensors' sin": other_result(torch.Tensor, "sin", centred), "a class's call": call_of("__call__", of_class=True),
    "modules' call": other_result(nn.Module, "__call__", by="MLP"),
    "a class's _call_impl": call_of("_call_impl", of_class=True), "a class's code": code_of_class,
    "a module's _call_impl": call_of("_call_impl"), "a module's compiled call": call_of("_compiled_call_impl"),
    "function mode": within(DoublesActivations), "dispatch mode": within(DoublesDispatched),
    "registered window": registered(functools.partial(window_attention)), "registered log n": registered(log_attention),
    "registered mask": registered(AttentionInterface._global_mapping["sdpa"], window_mask),
    "in place of sdpa": in_place_of(AttentionInterface._global_mapping, "sdpa", window_attention),
    "in place of sdpa's mask": in_place_of(AttentionMaskInterface._global_mapping, "sdpa", window_mask),
    "in place of sdpa in one file": in_place_of(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", window_attention),
    "in place of eager": eager_of_module, "in place of torch's": of_torch, "in one layer": in_one_layer,
    "rotary": rotary_of_module,
}  # fmt: skip
