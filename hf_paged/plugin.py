"""Apply and undo all changes that hf_paged makes to other packages.

`install`, which the import of hf_paged calls: four methods of transformers' GenerationMixin, the names of our functions
in transformers' registries of attention and masks, and lm-eval's model `hf-paged`. (Beside these, attributes of configs
and of PEFT's layers become descriptors for good, see `integration/substitutes.py`.) `install_serving`, on request only:
transformers' continuous batching and `transformers serve`. Each is done when the module concerned is imported, or at
once if it has been. Importing hf_paged therefore imports nothing heavy, and adds a finder to `sys.meta_path`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hf_paged.annotations import Model
from hf_paged.integration.patches import Patches, Point

_MIXIN = "transformers.generation.utils", "GenerationMixin"
_MODELING = "transformers.modeling_utils"
_BATCHING = "transformers.generation.continuous_batching.continuous_api"
_SERVE = "transformers.cli.serving.utils"
_PEFT = "peft"
_LM_EVAL = "lm_eval.models"

_LM_EVAL_MODEL = "hf-paged"
_LM_EVAL_CLASS = "hf_paged.bridges.lm_eval:PagedLM"

_REMEDY = "Use another version of transformers, a newer hf_paged, or do without hf_paged.install_serving()"

_is_default = False


def _register_attention() -> None:
    from hf_paged.integration import attention

    attention.register()


def _open_adapters() -> None:
    from hf_paged.features.adapters import adapters

    adapters.kinds()


def _register_lm_eval() -> None:
    registry = _lm_eval_registry()
    if registry is not None and _LM_EVAL_MODEL not in registry:
        registry.register(_LM_EVAL_MODEL, target=_LM_EVAL_CLASS)


def _lm_eval_registry() -> Any:
    """None for an lm-eval that has no registry of models by name, as 0.4.9 and older."""
    return getattr(sys.modules.get("lm_eval.api.registry"), "model_registry", None)


def _unregister_lm_eval() -> None:
    registry = _lm_eval_registry()
    if registry is not None and _LM_EVAL_MODEL in registry:
        del registry._objs[_LM_EVAL_MODEL]  # lm-eval has no method for it


# The functions that are called in place of the methods. They import their rooms, which are heavy, when they are called.


def _generate(function: Callable[..., Any], model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        from hf_paged.generation import paged_generate
    except (ImportError, AttributeError) as error:  # this transformers lacks a name; plain calls need none of them
        if kwargs.get("cache_implementation") != "paged":
            return function(model, *args, **kwargs)
        from hf_paged.versions import blamed

        raise blamed(error) from error
    return paged_generate.generate(function, model, args, kwargs, by_default=_is_default)


def _prepare_cache(function: Callable[..., Any], model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from hf_paged.generation import paged_generate

    return paged_generate.prepare_cache_for_generation(function, model, args, kwargs)


def _sample(function: Callable[..., Any], model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from hf_paged.generation import paged_generate

    return paged_generate.sample(function, model, args, kwargs)


def _beam_search(function: Callable[..., Any], model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from hf_paged.generation import paged_generate

    return paged_generate.beam_search(function, model, args, kwargs)


def _assisted(function: Callable[..., Any], model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from hf_paged.generation import paged_generate

    return paged_generate.assisted_decoding(function, model, args, kwargs)


def _init_batching(function: Callable[..., Any], model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from hf_paged.bridges import continuous_batching

    return continuous_batching.init_continuous_batching(function, model, args, kwargs)


def _get_manager(function: Callable[..., Any], state: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from hf_paged.bridges import transformers_serve

    return transformers_serve.get_manager(function, state, args, kwargs)


def _build_config(function: Callable[..., Any], handler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from hf_paged.bridges import transformers_serve

    return transformers_serve.build_generation_config(function, handler, args, kwargs)


_core = Patches(
    [
        Point(*_MIXIN, "generate", _generate),
        Point(*_MIXIN, "_prepare_cache_for_generation", _prepare_cache),
        Point(*_MIXIN, "_sample", _sample),
        Point(*_MIXIN, "_beam_search", _beam_search),
        Point(*_MIXIN, "_assisted_decoding", _assisted),
    ],
    {_MODELING: _register_attention, _PEFT: _open_adapters, _LM_EVAL: _register_lm_eval},
)
_BATCHING_PARAMETERS = ("self", "generation_config", "continuous_batching_config", "workload_hints")
_CONFIG_PARAMETERS = ("self", "body", "model_generation_config", "use_cb")
_serving = Patches(
    [
        Point(_BATCHING, "ContinuousMixin", "init_continuous_batching", _init_batching, _BATCHING_PARAMETERS, _REMEDY),
        Point(_SERVE, "GenerationState", "get_manager", _get_manager, ("self", "model_id", "use_cb"), _REMEDY),
        Point(_SERVE, "BaseHandler", "_build_generation_config", _build_config, _CONFIG_PARAMETERS, _REMEDY),
    ]
)


def install(*, default: bool | None = None) -> None:
    """Put the plugin into transformers: at once if that has been imported, else when it is. Idempotent.

    `import hf_paged` calls it. Afterwards `model.generate(..., cache_implementation="paged")` works.

    Args:
        default: Whether calls of `generate` that name no cache are paged too. Such a call runs without a paged cache,
            after a warning that says why, if it cannot be paged. None = as before; at first they are not.

    Raises:
        ValueError: If `default` is neither a bool nor None.

    Example:
        ```python
        import torch
        from transformers import AutoModelForCausalLM
        import hf_paged

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        hf_paged.install(default=True)
        with hf_paged.record_calls() as records:
            model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4)
        assert len(records) == 1
        hf_paged.install(default=False)
        ```
    """
    global _is_default
    if default is not None:
        if not isinstance(default, bool):
            raise ValueError(f"default={default!r}: use True, False or None")
        _is_default = default
    # Last, because what it installs reads `_is_default`.
    _core.install()


def uninstall() -> None:
    """Restore everything that `install` and `install_serving` changed. Idempotent.

    `install` puts it back.

    Example:
        ```python
        import hf_paged

        hf_paged.uninstall()
        hf_paged.install()
        ```
    """
    global _is_default
    # A later `install` begins as the first one did.
    _is_default = False
    uninstall_serving()
    if _core.uninstall():
        _unregister_lm_eval()
        if _MODELING in sys.modules:
            from hf_paged.integration import attention

            attention.unregister()


def install_serving() -> None:
    """Run transformers' continuous batching on `hf_paged.Engine`, until `uninstall_serving`. Idempotent.

    That is `model.generate_batch`, `init_continuous_batching`, `continuous_batching_context_manager` and what calls
    them, such as TRL with `use_transformers_continuous_batching=True`, and `transformers serve --continuous-batching`.
    Each request then has its own generation config. Managers and servers that run already stay as they are.

    Raises:
        UnsupportedVersionError: If hf_paged does not run with this transformers. The message names those it runs with.
        RuntimeError: Here or when transformers' module is imported, if its methods are not those that hf_paged knows.

    Example:
        ```python
        from transformers import AutoModelForCausalLM, GenerationConfig
        import hf_paged

        hf_paged.install_serving()
        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        outputs = model.generate_batch([[1, 5, 6], [1, 7]], generation_config=GenerationConfig(max_new_tokens=4))
        print([output.generated_tokens for output in outputs.values()])
        hf_paged.uninstall_serving()
        ```
    """
    # Before a method is replaced that this version may call otherwise.
    _require_known_version()
    _serving.install()


def _require_known_version() -> None:
    from hf_paged.versions import blamed, installed, is_tested

    if is_tested(installed()):
        return
    try:
        from hf_paged.model.support import require_version
    except (ImportError, AttributeError) as error:
        raise blamed(error) from error
    require_version()


def uninstall_serving() -> None:
    """Restore what `install_serving` changed. Managers that exist continue. Idempotent.

    Example:
        ```python
        import hf_paged

        hf_paged.uninstall_serving()
        ```
    """
    _serving.uninstall()


def is_installed() -> bool:
    return _core.is_installed


def is_serving_installed() -> bool:
    return _serving.is_installed


def is_default() -> bool:
    """Return True if calls of `generate` that name no cache are paged."""
    return _is_default
