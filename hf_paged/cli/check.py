"""`hf-paged check`: how a checkpoint runs with a paged cache, and whether the plugin is installed."""

from __future__ import annotations

from typing import Annotated

import typer

import hf_paged
from hf_paged.cli.common import (
    EXIT_REFUSED,
    Checkpoint,
    Device,
    DType,
    DTypeOption,
    Job,
    find_checkpoint,
    show,
)
from hf_paged.model.loading import load_model


def check(
    checkpoint: Checkpoint,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="use random weights: only config.json is needed")
    ] = False,
) -> Job:
    """Report, layer by layer, how a checkpoint runs with a paged cache, and why.

    The last line says whether the plugin is installed in transformers.
    """
    return lambda: _check(checkpoint, dtype, device, config_only)


def _check(checkpoint: str, dtype: DType, device: str | None, config_only: bool) -> int:
    find_checkpoint(checkpoint)
    show("loading the model ...")
    report = hf_paged.check(load_model(checkpoint, dtype.value, device, random_weights=config_only))
    show("")
    print(report)
    print(plugin_status())
    return 0 if report.supported else EXIT_REFUSED


def plugin_status() -> str:
    """One line: whether hf_paged handles `cache_implementation="paged"` in this process."""
    import transformers

    from hf_paged import plugin

    versions = f"hf_paged {hf_paged.__version__} in transformers {transformers.__version__}"
    if not plugin.is_installed():
        return f"plugin: not installed ({versions}); call hf_paged.install()"
    return f"plugin: installed ({versions}); a script of yours installs it with hf_paged.install()"
