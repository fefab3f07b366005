"""Find third-party code within a model's forward (`ForeignCode`): it may depend on how tokens are laid out.

Such code sees a left-padded batch and one new token a row in plain `generate`, but one row of all tokens in a packed
step. That it computes each token on its own cannot be proven by trying it, so its presence is enough: the model then
runs with the layout of plain `generate`. Code of torch, transformers and accelerate is trusted, and so is what its
owner has marked (`tokenwise`). Knows modules and functions; never tokens.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as _module

from hf_paged.errors import UnsupportedModelError
from hf_paged.features.watch.stood_in_for import OF_CHOICE, namespaces, originals, replaced
from hf_paged.integration.attention import IMPLEMENTATION, configs_of, own_implementation
from hf_paged.locks import usable_after_fork
from hf_paged.model.calls import CALLING, OF_INSTANCE, helpers, modes
from hf_paged.model.overrides import is_override
from hf_paged.model.picture import Surroundings
from hf_paged.model.state import Slot, state_of

_Function = TypeVar("_Function", bound=Callable[..., Any])

_TRUSTED = frozenset({"torch", "transformers", "accelerate", "safetensors", "hf_paged"})
# What a function of these does is done by the functions that it wraps or is given.
_LIBRARY = frozenset(sys.stdlib_module_names)
# PEFT's other hooks pass what belongs to the rows of one batch, such as the name of each row's adapter.
_TRUSTED_HOOKS = frozenset({"make_inputs_require_grad"})
# TRL's forward of a model passes on what does not ask for its loss; compressed-tensors' moves tensors to a device. Both
# have the names of what they wrap.
_TRUSTED_FORWARDS = frozenset(
    {("trl.trainer.utils", "_fused_forward"), ("compressed_tensors.offload.module", "forward")}
)
_ATTENTION = ("sdpa_attention", "flash_attention", "flex_attention")  # modules of transformers.integrations
_COMMON = {"masking_utils", "integrations.sdpa_attention", "integrations.moe"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = (_module._global_forward_hooks, _module._global_forward_pre_hooks)
# Functions in functions: a bound, because closures may refer to one another.
_MAX_DEPTH = 8

_tokenwise: weakref.WeakSet[Any] = weakref.WeakSet()


def tokenwise(function: _Function) -> _Function:
    """Mark a hook, or a function that replaces a `forward`, as one that treats each token on its own.

    A model with hooks or replaced functions runs with the layout of plain `generate`, which is slower, because such
    code may depend on the batch: `hidden[:, -1]`, a mean over `dim=1`, or `hidden.shape[1]` mean something else where
    the tokens of all sequences are one row `[1, num_tokens, ...]`. Code that is marked gets such rows.

    Args:
        function: The hook or function. A method is marked for all objects of its class.

    Returns:
        The function itself, so that `@tokenwise` decorates.

    Example:
        ```python
        from transformers import AutoModelForCausalLM
        import hf_paged

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")


        @hf_paged.tokenwise
        def double(module, args, output):
            return 2 * output


        hook = model.model.layers[0].mlp.register_forward_hook(double)
        assert hf_paged.check(model).native
        hook.remove()
        ```
    """
    # Of a method the function, because each access makes another bound method.
    _tokenwise.add(_key(function))
    return function


def _key(function: object) -> Any:
    return getattr(function, "__func__", function)


def stranger(value: object, home: str = "", depth: int = 0) -> str | None:
    """The name of the third-party code in a callable: its own, what it wraps, or what it is given; None: there is none.

    home: the name of a module that is trusted too.
    """
    if depth > _MAX_DEPTH or is_override(value) or _is_marked(value):
        return None
    inside: Iterator[Any] = iter(())
    if isinstance(value, functools.partial):
        inside = iter((value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, MethodType):
        own = value.__self__
        # The class of the object decides what its method computes.
        if not isinstance(own, (nn.Module, type)) and not _has_trusted_type(own):
            return _named(type(own))
        inside = iter((value.__func__,))
    elif isinstance(value, FunctionType):
        module = value.__globals__.get("__name__", "")
        is_known = value.__name__ in _TRUSTED_HOOKS or (module, value.__code__.co_name) in _TRUSTED_FORWARDS
        # By its globals and its file: `functools.wraps` copies the name and the module of another function.
        if not is_known and not (_is_trusted(module, home) and _is_of_its_file(value)):
            return _named(value)
        inside = (cell for cell in map(_content, value.__closure__ or ()) if isinstance(cell, _FUNCTIONS))
    elif isinstance(value, nn.Module):
        hook = vars(value).get("_hf_hook")  # accelerate's, whose functions are given the module
        return next((_named(type(h)) for h in getattr(hook, "hooks", (hook,)) if h and not _has_trusted_type(h)), None)
    elif isinstance(value, functools._lru_cache_wrapper):
        inside = iter((value.__wrapped__,))
    elif callable(value) and not isinstance(value, type) and not _has_trusted_type(value):
        return _named(type(value))
    return next((found for each in inside if (found := stranger(each, home, depth + 1)) is not None), None)


_FUNCTIONS = (FunctionType, MethodType, functools.partial)


def _is_marked(value: object) -> bool:
    try:
        return _key(value) in _tokenwise
    except TypeError:  # without hash or weak references
        return False


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _is_trusted(module: str, home: str) -> bool:
    top = module.partition(".")[0]
    return top in _TRUSTED or top in _LIBRARY or module == home


def _is_of_its_file(function: FunctionType) -> bool:
    """Return False if a function in a trusted library's namespace was compiled from another file.

    Functions in other namespaces are not judged here. Without a source file, as in a zip, code may name any file.
    """
    module = str(function.__globals__.get("__name__", ""))
    if module.partition(".")[0] not in _TRUSTED:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module in sys.modules
    return function.__code__.co_filename == file or not (file.endswith(".py") and Path(file).is_file())


def _has_trusted_type(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in _TRUSTED | {"builtins", "operator", "types", "typing"}


def _named(value: Any) -> str:
    """The name of a class, or of a function's code: `functools.wraps` gives a function the name of another one."""
    if isinstance(value, FunctionType):
        code = value.__code__
        return f"{value.__globals__.get('__name__')}.{code.co_qualname}"
    return f"{value.__module__}.{value.__qualname__}"


# -- where such code can be ------------------------------------------------------------------------------------------


def _in_modules(model: nn.Module) -> str | None:
    """A hook of a module, or a `forward` set on one, or what calls it or is called by it."""
    for module in model.modules():
        for hooks, kind in zip((module._forward_hooks, module._forward_pre_hooks), ("hook", "pre-hook")):
            for hook in list(hooks.values()):
                if found := stranger(hook):
                    return f"a {type(module).__name__} has a forward {kind} ({found})"
        for name in (*OF_INSTANCE, *helpers(type(module))):
            value = vars(module).get(name)
            if value is not None and (found := stranger(value, type(module).__module__)):
                return f"the {name} of a {type(module).__name__} is replaced ({found})"
    return None


def _in_classes(model: nn.Module) -> str | None:
    """A hook of all modules, or a `forward` set on a class of a library, or what calls it or is called by it."""
    for hooks in _GLOBAL_HOOKS:
        for hook in list(hooks.values()):
            if found := stranger(hook):
                return f"there is a forward hook on all modules ({found})"
    for kind in dict.fromkeys(map(type, model.modules())):
        for name in ("forward", *CALLING, *helpers(kind)):
            owner = next(each for each in kind.__mro__ if name in vars(each))
            if owner is nn.Module or not _is_trusted(owner.__module__, ""):
                continue  # of nn.Module: see `_in_torch`
            if found := stranger(_key(vars(owner)[name]), owner.__module__):
                return f"the {name} of {owner.__name__} is replaced ({found})"
    return None


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """Return the namespaces of transformers' modules that define the model's layers or what all models call."""
    names = {kind.__module__ for each in set(map(type, model.modules())) for kind in each.__mro__}
    names = {name for name in names if name.startswith("transformers.models.")}
    names |= {f"transformers.{name}" for name in _COMMON}
    return [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]


def _in_functions(model: nn.Module) -> str | None:
    """A function in a modeling module that other code has put there, or an attention or mask function."""
    spaces = _namespaces(model)
    for space in spaces:
        for name, value in list(space.items()):
            if name.startswith("__") or isinstance(value, type) or not callable(value):
                # torch.compile puts what it has compiled beside the functions that call it.
                continue
            if found := stranger(value, space["__name__"]):
                return f"{name} of {space['__name__']} is replaced ({found})"
    for name in dict.fromkeys(map(own_implementation, configs_of(model))):
        if found := _in_attention(name, spaces):
            return found
    return None


def _in_torch(*, of_choice: bool = False) -> str | None:
    """A function or method of others in place of torch's, or, of_choice, of those that choose tokens."""
    found = _early() | {name: stranger(value) or "another function" for name, value in replaced().items()}
    names = (name for name in found if not of_choice or name in OF_CHOICE)
    return next((f"{name} is replaced ({found[name]})" for name in names), None)


@functools.cache
def _early() -> dict[str, str]:
    """Return the torch functions that were replaced before hf_paged was imported, and whose code stands there."""
    return {name: found for name, value in originals().items() if (found := stranger(value)) is not None}


def _in_thread() -> str | None:
    """A mode of this thread that would see what native code replaces."""
    return next((f"a {kind.__name__} is active in this thread" for kind in modes()), None)


METHODS = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_sample",
    "_beam_search",
    "_prefill",
    "generate",
)
"""Methods of a model, of transformers' generation, whose work our own loops do."""


def replaced_method(model: nn.Module, name: str) -> str | None:
    """Whose code replaces this method of transformers' loop, on the model or its class; None: nobody's.

    What a class of others itself defines to prepare a step's inputs, the trial of the model has compared. A `generate`
    set on a model is for its own calls, and counts as nobody's.
    """
    owner = next((each for each in type(model).__mro__ if name in vars(each)), object)
    value, home = getattr(owner, name, None), owner.__module__ if name == METHODS[0] else ""
    if name in vars(model) and name != "generate":
        value, home = vars(model)[name], ""
    return None if value is None else stranger(value, home)


def _in_choice(model: nn.Module) -> str | None:
    """Name a foreign replacement that an engine would bypass, because it prepares steps and chooses tokens itself."""
    for name in METHODS:
        found = replaced_method(model, name)
        if name in vars(model) and (found or "").startswith("peft."):
            # While PEFT's `generate` runs, it puts a method of its own there.
            continue
        if found is not None:
            return f"{name} of {type(model).__name__} is not transformers' own ({found})"
    return _in_torch(of_choice=True)


def _registries() -> list[dict[str, Any]]:
    """The mappings from names to attention and mask functions."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    return [each for of in (FUNCTIONS, MASKS) for each in (of._global_mapping, of._local_mapping)]


def _in_attention(name: str, spaces: list[dict[str, Any]]) -> str | None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for space in spaces:
        eager = space.get("eager_attention_forward")
        if name == "eager" and eager is not None and getattr(eager, "__globals__", None) is not space:
            return f"eager_attention_forward of {space['__name__']} is replaced"
        interface = space.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
        function = None if name == "eager" else interface.get(name)
        homes = {*(f"transformers.integrations.{each}" for each in _ATTENTION), space["__name__"]}
        if function is not None and not _is_of(function, homes):
            return f"the attention function {name!r} is not transformers' own"
    mask = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if mask is not None and not _is_of(mask, {"transformers.masking_utils"}):
        return f"the mask function {name!r} is not transformers' own"
    return None


def _is_of(function: Any, homes: set[str]) -> bool:
    """Tell whether one of these modules defines the function under its name.

    Transformers decorates some of its own functions (in 5.17 and 5.18 that of SDPA's masks), by its own decorators.
    """
    *wrappers, bare = _wrapped(function)
    space = getattr(bare, "__globals__", {})
    is_defined = space.get("__name__") in homes and space.get(bare.__name__) is function
    is_defined = is_defined and _is_of_its_file(bare)
    return (is_defined and all(map(_is_of_transformers, wrappers))) or is_override(function)


def _wrapped(function: Any) -> Iterator[Any]:
    """The function, and what its decorators wrap, from the outermost on."""
    yield function
    while (function := getattr(function, "__wrapped__", None)) is not None:
        yield function


def _is_of_transformers(function: Any) -> bool:
    module = str(getattr(function, "__globals__", {}).get("__name__"))
    return module.partition(".")[0] == "transformers" and _is_of_its_file(function)


# -- the record ------------------------------------------------------------------------------------------------------

_slot: Slot[ForeignCode] = Slot("third-party code", is_released=False)


class ForeignCode:
    """The third-party code in one model as of the last look. Holds the model weakly; any thread may look.

    inside: that in hooks and `forward`s of its modules, which `bare_copy` leaves out. around: that in classes,
    functions of modeling modules and of torch, attention and mask functions, and modes. in_choice: that in what
    prepares a step's inputs and chooses tokens, which concerns engines only. All in words, None if there is none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._weights = state_of(model).weights
        self._lock = usable_after_fork(threading.RLock())
        self._text = -1  # `Weights.text` of the last examination
        self.has_library_modules = False  # all modules are of classes whose forwards keep no tensors
        self.inside: str | None = None
        self._around: str | None = None  # but for modes, which belong to a thread
        self.in_choice: str | None = None

    @property
    def around(self) -> str | None:
        return self._around or _in_thread()

    @property
    def reason(self) -> str | None:
        """Why the model may compute something else for packed rows; None: nothing of others runs in it."""
        found = self.inside or self.around
        return found and f"{found}, which may depend on how tokens are laid out (see hf_paged.tokenwise)"

    def look(self, *, names: bool = True) -> str | None:
        """The present `reason`. Examines the model only if its code, or that around it, has changed. names: see
        `Weights.look`."""
        with self._lock:
            self._weights.look(names=names)
            if self._weights.text != self._text:
                self._examine()
            reason = self.reason
        return reason

    def refuse_choice(self) -> None:
        """Raises UnsupportedModelError if there is code now that an engine would go around."""
        model = self._model()
        self.in_choice = None if model is None else _in_choice(model)
        if self.in_choice is not None:
            raise UnsupportedModelError(
                f"{self.in_choice}, and an engine does its work itself; undo it, or call model.generate"
            )

    def refuse(self) -> None:
        """Raises UnsupportedModelError if there is such code now."""
        # Without names, because every step asks.
        if reason := self.look(names=False):
            raise UnsupportedModelError(f"since this call began, {reason}")

    def _examine(self) -> None:
        model = self._model()
        if model is None:
            return
        text = self._weights.text
        owners = [vars(module) for module in [*model.modules()][1:] if vars(module).get("config") is not None]
        fields = [(owner, "config") for owner in owners]
        fields += [(vars(config), IMPLEMENTATION) for config in configs_of(model)]
        methods = [(type(model), name) for name in METHODS]
        # Recorded before the examination: a change in between is then found by the next look.
        surroundings = Surroundings(
            fields, _GLOBAL_HOOKS, [*namespaces(), *_namespaces(model), *_registries()], methods
        )
        classes = {type(module).__module__.partition(".")[0] for module in model.modules()}
        self.has_library_modules = classes <= {"torch", "transformers", "peft"}
        self.inside = _in_modules(model)
        former, self._around = self._around, _in_classes(model) or _in_functions(model) or _in_torch()
        if former or self._around:
            # The numbers are others too, with this code or without it.
            self._weights.changed()
        self.in_choice = _in_choice(model)
        if self._around is not None or self.in_choice is not None:
            surroundings.drop_values()
        self._weights.watch(surroundings)
        self._text = text  # last: after an interrupt, the next look examines it again


def foreign_code(model: nn.Module) -> ForeignCode:
    """The record of a transformers model, as of its last look."""
    return _slot.get(model) or _slot.setdefault(model, ForeignCode(model))


def bare_copy(model: nn.Module) -> Any:
    """A copy of the model without hooks and `forward`s of others, to try things on: it shares tensors and configs.

    Other attributes that are neither modules nor refer to them directly are shared too.
    """
    # All objects first, because modules refer to one another.
    copies = {id(module): object.__new__(type(module)) for module in model.modules()}

    def mapped(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return copies.get(id(value), value)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, mapped(value.__self__))
        if isinstance(value, functools.partial):
            keywords = {name: mapped(each) for name, each in value.keywords.items()}
            return functools.partial(mapped(value.func), *map(mapped, value.args), **keywords)
        if type(value) in (list, tuple):
            return type(value)(map(mapped, value))
        if type(value) in (dict, OrderedDict):
            return type(value)((name, mapped(each)) for name, each in value.items())
        return value

    for module in model.modules():
        own = {name: mapped(value) for name, value in list(vars(module).items())}
        for name in _HOOKS:
            own[name] = OrderedDict((key, hook) for key, hook in own[name].items() if stranger(hook) is None)
        for name in (*OF_INSTANCE, *helpers(type(module))):
            value = vars(module).get(name)
            if is_override(value) or (value is not None and stranger(value, type(module).__module__)):
                own.pop(name, None)
        vars(copies[id(module)]).update(own)
    return copies[id(model)]
