"""What hf_paged patches in other packages, and when.

`install`, which the import of hf_paged calls: four methods of transformers' GenerationMixin, and lm-eval's model
`hf-paged`. `install_serving`, on request only: transformers' continuous batching and `transformers serve`. Patches are
applied when the module concerned is imported, or at once if it has been, so that importing hf_paged imports nothing
heavy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hf_paged.integration.patches import Patches, Point

_GENERATE = "transformers.generation.utils"
_MODELING = "transformers.modeling_utils"
_BATCHING = "transformers.generation.continuous_batching.continuous_api"
_SERVE = "transformers.cli.serving.utils"
_LM_EVAL = "lm_eval.models"

_LM_EVAL_MODEL = "hf-paged"
_LM_EVAL_CLASS = "hf_paged.bridges.lm_eval:PagedLM"

_REMEDY = "Use a version of transformers from 5.17 to 5.23, a newer hf_paged, or do without hf_paged.install_serving()"

_is_default = False


def _register_attention() -> None:
    from hf_paged.integration import attention

    attention.register()


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


_core = Patches(
    [
        Point(_GENERATE, "GenerationMixin", method, "hf_paged.generation.paged_generate")
        for method in ("generate", "_prepare_cache_for_generation", "_sample", "_beam_search")
    ],
    {_MODELING: _register_attention, _LM_EVAL: _register_lm_eval},
)
_serving = Patches(
    [
        Point(
            _BATCHING,
            "ContinuousMixin",
            "init_continuous_batching",
            "hf_paged.bridges.continuous_batching",
            ("self", "generation_config", "continuous_batching_config", "workload_hints"),
            _REMEDY,
        ),
        Point(
            _SERVE,
            "GenerationState",
            "get_manager",
            "hf_paged.bridges.transformers_serve",
            ("self", "model_id", "use_cb"),
            _REMEDY,
        ),
        Point(
            _SERVE,
            "BaseHandler",
            "_build_generation_config",
            "hf_paged.bridges.transformers_serve",
            ("self", "body", "model_generation_config", "use_cb"),
            _REMEDY,
        ),
    ]
)


def install(*, default: bool | None = None) -> None:
    """Register the backend: at once if transformers has been imported, else when it is imported. Idempotent.

    default: whether calls of `generate` that name no cache are paged too (None: as before; at first they are not). Such
    a call runs without a paged cache, after a warning that says why, if it cannot be paged.
    """
    global _is_default
    if default is not None:
        if not isinstance(default, bool):
            raise ValueError(f"default={default!r}: use True, False or None")
        _is_default = default
    _core.install()


def uninstall() -> None:
    """Restore everything that `install` and `install_serving` changed. Idempotent."""
    global _is_default
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

    Raises RuntimeError, here or when transformers' module is imported, if the version of transformers is not known.
    """
    _serving.install()


def uninstall_serving() -> None:
    """Restore what `install_serving` changed. Managers that exist go on. Idempotent."""
    _serving.uninstall()


def is_installed() -> bool:
    return _core.is_installed


def is_serving_installed() -> bool:
    return _serving.is_installed


def is_default() -> bool:
    """Whether calls of `generate` that name no cache are paged."""
    return _is_default


def original(method: str) -> Callable[..., Any]:
    """The method of GenerationMixin that our wrapper replaced: transformers' own, unless other code had replaced it."""
    return _core.original(method)
