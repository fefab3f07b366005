"""Loads PEFT adapters into a served model, and removes them, by PEFT's own functions. The base model stays as it is.

Loading is a transaction: the file's keys and shapes are compared with the layers made for it, which have no memory yet;
then the base, the adapters that were there, and the new one are tried. What fails leaves the model as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_paged.annotations import Model
from hf_paged.errors import UnsupportedModelError
from hf_paged.features.adapters.adapters import BASE, Adapters, layers_of, switch_off
from hf_paged.generation.engine.engine import Engine
from hf_paged.model.overrides import ABSENT, Overrides, Patch
from hf_paged.model.state import state_of
from hf_paged.model.support import refuse_unsupported, trial_logits
from hf_paged.model.trial import Refusal, Trial, attempt
from hf_paged.serving.adapter_files import AdapterFile


def load_adapter(model: Model, name: str, folder: str) -> None:
    """Load a PEFT adapter under this name, for requests that name it; the model itself stays without adapters.

    Requests that are being prepared in another thread wait: they must not see an adapter that has a part of its layers.
    Raises ValueError if the adapter cannot be loaded or does not compute, and if the base or another adapter would
    compute something else beside it; the model is then as before.
    """
    _load_file(model, name, read_adapter(model, folder))


def read_adapter(model: Model, folder: str) -> AdapterFile:
    """Read and check an adapter's files, in any thread and beside the model's steps: its patterns may take seconds.
    Raises ValueError if there is no adapter."""
    file = AdapterFile.open(folder)
    with state_of(model).lock:
        modules = [key for key, _ in model.named_modules(remove_duplicate=False)]
    # Without the lock, because requests in preparation wait for it and this may take seconds.
    file.check_patterns(modules)
    return file


def _load_file(model: Model, name: str, file: AdapterFile) -> None:
    # Requests for the model itself have this name.
    if name == BASE:
        raise ValueError(f"an adapter cannot have the name {BASE!r}, which stands for the model without adapters")
    with state_of(model).lock:
        others = vars(model).get("peft_config") or {}
        if name in others:
            raise ValueError(f"an adapter {name!r} is loaded already; unload it, or choose another name")
        # Before anything changes: what the model computes now is what it must compute afterwards.
        names, before = (BASE, *others), Snapshot(model)
        expected, is_served = {other: _trial(model, other) for other in names}, _is_served(model)
        try:
            _put_in(model, name, file)
            # Digests first: they find changes that a few tokens would not show.
            before.check_base()
            _compare(model, expected)
            if is_served:
                refuse_unsupported(model, by_engine=True)  # which tries the base with its new layers as an engine does
            if expected[BASE] is not None:
                _check_own(model, name)
        except BaseException as error:  # of PEFT, or of the model in a trial: any is possible
            before.restore()
            if isinstance(error, Exception):
                raise _refused(file.folder, error, names[1:]) from error
            raise


def load_into(engine: Engine, name: str, file: AdapterFile) -> None:
    """Load an adapter for the requests of an engine, which captures its graphs now: else a request would wait."""
    _load_file(engine.model, name, file)
    engine.warm_up()


def unload_adapter(model: Model, name: str) -> None:
    """Remove an adapter that `load_adapter` has loaded."""
    from peft.functional import delete_adapter
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    # Requests in preparation wait, or they could choose an adapter that is half gone.
    with state_of(model).lock, _quietly():
        config: Any = model.peft_config.pop(name)
        delete_adapter(model, name, PEFT_TYPE_TO_PREFIX_MAPPING[config.peft_type])
        if not model.peft_config:
            del model.peft_config
            model._hf_peft_config_loaded = False
        _take_out_idle(model)
        switch_off(model)


def _take_out_idle(model: nn.Module) -> None:
    """Put back the modules of the base whose wrappers have no adapter left."""
    idle = {wrapper for wrapper, names in layers_of(model).items() if not names}
    # A list, because modules are exchanged while their parents are gone through.
    for parent in list(model.modules()):
        for child, module in parent._modules.items():
            own: Any = module
            while own in idle:
                own = own.original_module if hasattr(own, "original_module") else own.get_base_layer()
            parent._modules[child] = own


def _refused(folder: str, error: Exception, others: Sequence[str]) -> ValueError:
    if isinstance(error, _Wrong):
        return ValueError(f"the adapter {folder} cannot be used: {error}")
    is_other = isinstance(error, _NotOfThisModel)
    what = "is not one of this model" if is_other else f"cannot be loaded: {type(error).__name__}"
    beside = f" (beside {', '.join(map(repr, others))}; it may fit where none of them is)" if others else ""
    return ValueError(f"the adapter {folder} {what}: {error}{beside}")


class _NotOfThisModel(ValueError):
    """The file has other weights than the model's layers need."""


class _Wrong(ValueError):
    """The adapter, or what was there before it, does not compute as it should."""


# -- the model before and after ---------------------------------------------------------------------------------------


class Snapshot:
    """A record of a model's modules, their attributes, and its weights' places and digests, to undo what PEFT adds."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(vars(module), _held(vars(module))) for module in model.modules()]
        tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
        self._tensors = [(each, each.data, each.requires_grad, _digest(each)) for each in tensors.values()]

    def check_base(self) -> None:
        """Raise ValueError if a weight has another content than before."""
        count = sum(_digest(tensor) != digest for tensor, _, _, digest in self._tensors)
        if count:
            self.restore()
            is_undone = all(_digest(tensor) == digest for tensor, _, _, digest in self._tensors)
            remedy = "merge it, and serve the merged model" if is_undone else "they cannot be restored; start anew"
            raise _Wrong(f"PEFT changes {count} weights of the base model for it; {remedy}")

    def restore(self) -> None:
        """Undo what was added, removed or put into another place since; not what was written into a weight's memory."""
        for own, held in self._modules:
            # In the dictionaries themselves, because setting an attribute of a module runs code.
            for key in own.keys() - held.keys():
                del own[key]
            for key, (value, contents) in held.items():
                own[key] = value
                if isinstance(value, list):
                    value[:] = contents
                elif contents is not None:
                    value.clear()
                    value.update(contents)
        # Weights may have been moved into other memory, or may require gradients now.
        for tensor, data, requires_grad, _ in self._tensors:
            tensor.data = data
            tensor.requires_grad_(requires_grad)


def _held(own: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each attribute, with a copy of its contents if they may change in place."""
    return {key: (value, value.copy() if isinstance(value, dict | list | set) else None) for key, value in own.items()}


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> int:
    """The sum of all bits as integers: other contents have, almost certainly, another one. It takes as long as reading
    the tensor: as integers of eight bytes, because torch sums smaller ones at a tenth of that speed."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    if local.device.type == "meta" or not local.numel():
        return 0
    try:
        data = local.contiguous().view(-1).view(torch.uint8)
        whole = len(data) // 8 * 8
        return int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum(dtype=torch.int64))
    except (RuntimeError, TypeError):  # a layout or type without views of its bits
        return 0


def _trial(model: Model, name: str) -> torch.Tensor | None:
    """Logits of a few tokens with this adapter alone. None: the model cannot be tried on a few tokens, for example one
    that needs an image; its adapters are then taken as their shapes say."""
    adapters = Adapters(model)
    logits = attempt(lambda: adapters.run(adapters.choose(name), lambda: trial_logits(model)))
    return None if isinstance(logits, Refusal) else logits


def _is_served(model: Model) -> bool:
    try:
        refuse_unsupported(model, by_engine=True)
    except UnsupportedModelError:
        return False
    return True


def _compare(model: Model, expected: dict[str, torch.Tensor | None]) -> None:
    """Raise ValueError if the base or an adapter that computed before gives other logits now."""
    for name, wanted in expected.items():
        # It could not be tried before either.
        if wanted is None:
            continue
        adapters = Adapters(model)
        found = adapters.run(adapters.choose(name), lambda: trial_logits(model))
        what = "the base model" if name == BASE else f"adapter {name!r}"
        refusal = Trial(model, [found], [wanted], differs="by {error:.2g}").refusal()
        if refusal is not None:
            raise _Wrong(f"beside it {what} computes other logits ({refusal.reason}); serve it in a process of its own")


def _check_own(model: Model, name: str) -> None:
    """Raise ValueError if the adapter's own logits are no numbers."""
    adapters = Adapters(model)
    logits = adapters.run(adapters.choose(name), lambda: trial_logits(model))
    if logits.isnan().any():
        raise _Wrong("its logits are NaN on a few tokens")


# -- putting it in -----------------------------------------------------------------------------------------------------


def _put_in(model: Model, name: str, file: AdapterFile) -> None:
    """Add the adapter's layers, switched off, and their weights. Raises ValueError for a file with others."""
    from peft import inject_adapter_in_model
    from peft.utils import set_peft_model_state_dict

    # By identity, because PEFT puts modules of its own around those of the base.
    base = {id(each) for each in (*model.parameters(), *model.buffers())}
    with _quietly():
        inject_adapter_in_model(file.config, model, name, low_cpu_mem_usage=True)  # on the meta device: without memory
        # What is there now and was not there before belongs to the adapter.
        own = {key: each for key, each in _named(model) if id(each) not in base}
        inherited = {key: each for key, each in _named(model) if id(each) in base}
        # First their shapes alone, on the meta device: the weights are read only if all of them fit.
        shapes = {key: torch.empty(shape, dtype=torch.float32, device="meta") for key, shape in file.shapes.items()}
        with _instead_of_loading(model, lambda found: _check_weights(file, found, own, inherited)):
            _set(set_peft_model_state_dict, model, shapes, name)
        with _instead_of_loading(model, lambda found: _load(model, found, own, inherited)):
            _set(set_peft_model_state_dict, model, file.weights(), name)
    switch_off(model)  # requests switch on their own
    model._hf_peft_config_loaded = True  # for transformers' own methods


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _set(load: Callable[..., Any], model: Model, weights: dict[str, torch.Tensor], name: str) -> None:
    # Files name a weight as a PeftModel does; PEFT looks for some of them by the name that the model itself has.
    found = {key.removeprefix("base_model.model."): each for key, each in weights.items()}
    # PEFT asks every wrapper for the keys of this adapter, those too that do not have it.
    others = [vars(layer) for layer, names in layers_of(model).items() if name not in names]
    patches = Overrides([Patch(own, "adapter_state_dict_load_map", lambda name: {}) for own in others])
    patches.apply(model)
    try:
        load(model, found, name, low_cpu_mem_usage=True)
    except KeyError as error:
        raise _NotOfThisModel(f"it lacks {error.args[0]}") from error
    finally:
        patches.undo(model)


@contextmanager
def _instead_of_loading(model: Model, call: Callable[[dict[str, torch.Tensor]], None]) -> Iterator[None]:
    """Give `call` the weights that PEFT would load in this block, by the names of the model's parameters."""

    def load(found: dict[str, torch.Tensor], **options: Any) -> Any:
        call(found)
        return nn.modules.module._IncompatibleKeys([], [])

    patches = Overrides([Patch(vars(model), "load_state_dict", load, vars(model).get("load_state_dict", ABSENT))])
    patches.apply(model)
    try:
        yield
    finally:
        patches.undo(model)


def _check_weights(
    file: AdapterFile,
    found: dict[str, torch.Tensor],
    own: dict[str, torch.Tensor],
    inherited: dict[str, torch.Tensor],
) -> None:
    """Compare names and shapes of a file's weights with those of the layers made for it. inherited: of the base, which
    a file may repeat."""
    wanted = own | inherited
    unknown = sorted(found.keys() - wanted.keys())
    filled = {id(own[key]) for key in found.keys() & own.keys()}
    # Weights that have memory already were made by PEFT itself, and need not be in the file.
    lacking = sorted(key for key, each in own.items() if each.device.type == "meta" and id(each) not in filled)
    if unknown or lacking:
        first = f"lacks {lacking[0]}" if lacking else f"has {unknown[0]}"
        raise _NotOfThisModel(f"it {first}, and {len(unknown) + len(lacking) - 1} other weights differ too")
    for key, weight in found.items():
        if weight.shape != wanted[key].shape:
            what = "the base model's" if key in inherited else f"that of config {file.config.peft_type.value}"
            raise _NotOfThisModel(
                f"its {key} has shape {tuple(weight.shape)}, and {what} has {tuple(wanted[key].shape)}"
            )


def _load(
    model: Model, found: dict[str, torch.Tensor], own: dict[str, torch.Tensor], inherited: dict[str, torch.Tensor]
) -> None:
    for key, weight in found.items():
        if key in inherited:
            if not torch.equal(weight.to(inherited[key]), inherited[key]):
                raise _Wrong(
                    f"it has {key}, a weight of the base model, with other values; save it with "
                    "save_embedding_layers=False, or merge it, and serve the merged model"
                )
        elif weight.is_floating_point() and not weight.isfinite().all():
            raise _Wrong(f"its {key} has values that are not finite")
    # The class's own, because the instance's is replaced meanwhile; assigned, because the layers have no memory yet.
    nn.Module.load_state_dict(
        model, {key: each for key, each in found.items() if key in own}, strict=False, assign=True
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence PEFT's warnings about further adapters and the active adapter: they say nothing of this adapter."""
    with warnings.catch_warnings():
        for text in ("Already found a `peft_config`", "Adapter .* was active which is now deleted"):
            warnings.filterwarnings("ignore", message=text)
        yield
