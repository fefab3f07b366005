"""Functions of torch and transformers that a native path may replace, because their code has been read.

A trial shows what a function computes for the values of the trial. What it computes for others (a limit, a flag, a
position far away) only its code says. Code is known by its digest, which is the same in all versions of Python and, as
long as nobody edits the function, of transformers. Knows functions and modules; never kernels.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
import weakref
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from hf_paged.model.calls import CALLING, OF_INSTANCE, helpers
from hf_paged.model.overrides import without_override

_READ = {
    "norm": (
        "f93290dee49a",  # LlamaRMSNorm, and most others
        "d4ca6f53b6c3",  # Olmo2RMSNorm: multiplies before it rounds
        "bc4ddc5e0d0e",  # HeliumRMSNorm: the same, with the weight in fp32
        "07ac8924e1ed",  # Llama4TextRMSNorm
        "f20ce1c23b20",  # MoshiRMSNorm
        "b36d9bd5008c",  # Gemma3nRMSNorm, Gemma4RMSNorm
        "3c115e0574ee",  # CpmAntLayerNorm
    ),
    "rotary": (
        "1b40f945f5db",  # of Llama, and most others
        "e21d6c9c300c", "c4b9111f78b3", "3fb6670c8939",  # GLM-4 MoE, Phi-3, Nemotron: of the first elements of a head
        "3d428eb398af", "ba09f8f6c239",  # OLMo, ModernBERT: in fp32
    ),
    "layer": (
        "b100acf31e21", "33cbedde4402",  # LlamaDecoderLayer, and most others; before transformers 5.24
        "60c37afb2c00", "c16f6fe3e76d",  # MllamaSelfAttentionDecoderLayer
        "b8be8a911c6d", "72aef8f5ea1d",  # GraniteDecoderLayer: multiplies what it adds
    ),
    "attention": (
        "49e80dec1ab9", "e5ce88cf8036",  # LlamaAttention, and many others; before transformers 5.24
        "1d2361e21ffd", "505c500040e3",  # MinistralAttention, CwmAttention
        "d9c7a3b5bf2c", "e9662157128f",  # MistralAttention
        "9afaaa9540cb", "6e035f28dd5a",  # Qwen3Attention
        "feb3016a651e", "b0f6684c6955",  # HYV3Attention
        "0743648c3f13", "5439edff2d9f",  # Glm4MoeAttention
        "fb65f602a143", "2085b5d898b6", "c3c093f4fff9", "e0696c77283c",  # SmolLM3Attention, Exaone4Attention
        "78d45490e5dd", "a4eaf5b06d65",  # MllamaTextSelfAttention
        "831e53d2cc47", "6a0f5d9dbb85",  # SeedOssAttention: with dropout
    ),
    "mlp": (
        "bb002ec3b41e",  # LlamaMLP, and most others
        "a437c7e2838d",  # SeedOssMLP: with dropout
    ),
    "silu": ("227d0fab4e9a", "eda57ac63900"),  # SiLUActivation, nn.SiLU
    "activation": (
        "d45fe5c7e6ef", "2097be16e542",  # GELUActivation and GELUTanh, whose function is an attribute; nn.GELU
        "1b137937e634", "d5a437724f7a", "875e5060356b",  # NewGELUActivation, FastGELUActivation, QuickGELUActivation
        "e250a06cb7bf", "8810cf98a89b", "4429f5db4396",  # nn.ReLU, ReLUSquaredActivation, nn.Sigmoid
    ),
    "gate": (
        "98d722bcdb01",  # of transformers' interface
        "b039cfb39a51", "ef8500c2d26e", "7778d098e0d8",  # GptOssExperts, OpenAIPrivacyFilterExperts, MiniMaxM3VLExperts
        "aab61a578216", "9930d59a419a", "558b4aad89fa",  # Step3p7Experts, DeepseekV4Experts, Glm5NextTextExperts
    ),
    "helper": (
        "e21e8add7cf5",  # rotate_half
        "a9876524ece0", "c7898df1c39e",  # _norm of Llama4TextRMSNorm, of Gemma3nRMSNorm
    ),
    # Around a forward, which they call with the arguments that they got.
    "decorator": ("5543328a2918", "a9247b4038f1", "6f37ca1f6311"),  # deprecate_kwarg; of GradientCheckpointingLayer
    "call": ("ebe2b3fde177",),  # GradientCheckpointingLayer.__call__, before transformers 5.23
}  # fmt: skip
KINDS = {digest: kind for kind, digests in _READ.items() for digest in digests}
"""The kind of computation that a function with this digest does."""

_digests: weakref.WeakKeyDictionary[CodeType, str] = weakref.WeakKeyDictionary()
_LEFT_OUT = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx", "decorator_list"})
# A packed step calls ours in place of it.
_ATTENTION = "eager_attention_forward"

Settings = list[tuple[dict[str, Any], str, Any]]
"""Dictionaries, names in them, and the values there."""


def is_known(function: object, kind: str, owner: type = object) -> bool:
    """Return True if the function is of this kind and its code, with the helpers it calls, has been read."""
    kinds = [KINDS.get(digest(each)) for each in _functions(function, owner)]
    return kinds[:1] == [kind] and all(each in ("helper", "rotary") for each in kinds[1:])


def is_known_module(module: nn.Module, kind: str) -> bool:
    """Return True if the class's forward is of this kind and has been read, and the module has its own parts.

    Hooks, and a `forward` that other code has set on the module, are not looked at here.
    """
    owner = type(module)
    if not is_known(owner.forward, kind, owner):
        return False
    others = [name for name in CALLING if getattr(owner, name) is not getattr(nn.Module, name)]
    if others and (others != ["__call__"] or not is_known(owner.__call__, "call")):
        return False
    if any(name in vars(module) for name in (*OF_INSTANCE[1:], *helpers(owner))):
        return False
    parts = [name for name in _names(owner) if name in module._modules or name in module._parameters]
    return not any(name in vars(module) or hasattr(owner, name) for name in parts)


def settings_of(module: nn.Module) -> Settings:
    """The attributes that the module's known forward reads, those of its config too, but whether it is in training."""
    names = _names(type(module))
    config = vars(module).get("config") if "config" in names else None
    owners = [vars(module), *([vars(config)] if config is not None else [])]
    return [(owner, n, owner[n]) for owner in owners for n in names if n in owner and n not in ("training", "config")]


def _names(owner: Any) -> list[str]:
    """List the attributes that the class's forward may read. Strings count, because `getattr` takes a name in one."""
    codes = [each.__code__ for each in _functions(owner.forward, owner)]
    strings = (each for code in codes for each in code.co_consts if type(each) is str)
    return list(dict.fromkeys([*(name for code in codes for name in code.co_names), *strings]))


def _functions(function: object, owner: type) -> list[FunctionType]:
    """The function without its decorators, and those of its module and of this class that it may call; [] if an unknown
    decorator is around it."""
    bare = _undecorated(function)
    if bare is None:
        return []
    names = [name for name in bare.__code__.co_names if name != _ATTENTION]
    found = [bare.__globals__.get(name) for name in names]
    # A method of every module is one of tensors there.
    found += [inspect.getattr_static(owner, name, None) for name in names if not hasattr(nn.Module, name)]
    return [bare, *(each for each in map(without_override, found) if type(each) is FunctionType)]


def _undecorated(function: Any) -> Any:
    """The function within the known decorators; None if another one is around it."""
    while type(function) is FunctionType and (inner := vars(function).get("__wrapped__")) is not None:
        cells = function.__closure__ or ()
        # `__wrapped__` may name anything; what a decorator calls is in its closure.
        if KINDS.get(digest(function)) != "decorator" or not any(cell.cell_contents is inner for cell in cells):
            return None
        function = inner
    return function if type(function) is FunctionType else None


def digest(function: object) -> str:
    """A value that functions with equal code have; "" for what is no function, or has no source that belongs to it.

    Comments, annotations, decorators and the docstring do not count, nor does the function's name.
    """
    if type(function) is not FunctionType:
        return ""
    code = function.__code__
    # Parsing takes long beside a look-up, and code objects do not change.
    if code not in _digests:
        _digests[code] = _digest(code)
    return _digests[code]


def _digest(code: CodeType) -> str:
    try:
        tree: Any = ast.parse("if 1:\n" + textwrap.indent(inspect.getsource(code), " "))
        runs = compile(tree, code.co_filename, "exec", dont_inherit=True)
    except Exception:  # its file may be gone, or may be another one by now, of any content
        return ""
    inner = [each for each in runs.co_consts if isinstance(each, CodeType) and each.co_name == code.co_name]
    definition = tree.body[0].body[0]
    if len(inner) != 1 or not isinstance(definition, ast.FunctionDef) or _traits(inner[0]) != _traits(code):
        return ""  # the file has changed since the function was made of it
    if ast.get_docstring(definition, clean=False) is not None:
        del definition.body[0]
    definition.name = ""
    return hashlib.sha256(repr(_shape(definition)).encode()).hexdigest()[:12]


def _traits(code: CodeType) -> list[Any]:
    """Return the parts of code that do not depend on where it is defined.

    Instructions are left out: they differ within a class or another function.
    """
    consts = [each for each in code.co_consts if type(each) not in (CodeType, str)]
    return [consts, sorted({*code.co_names, *code.co_freevars}), code.co_varnames]


def _shape(node: Any) -> Any:
    """The tree in lists; what is empty, or differs between versions of Python, is left out."""
    if isinstance(node, list):
        return list(map(_shape, node))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ast.iter_fields(node)
    return [type(node).__name__, *((n, _shape(x)) for n, x in fields if n not in _LEFT_OUT and x not in (None, []))]
