"""`hf-paged check`: how a checkpoint runs with a paged cache, and whether the plugin is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

import hf_paged
from hf_paged.cli.common import (
    EXIT_REFUSED,
    Checkpoint,
    Device,
    DType,
    DTypeOption,
    Job,
    UsageError,
    WeightsOption,
    find_checkpoint,
    show,
)
from hf_paged.serving.checkpoints import load_model


def check(
    checkpoint: Checkpoint,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
    weights: WeightsOption = None,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="use random weights: only config.json is needed")
    ] = False,
    users: Annotated[int | None, typer.Option(help="say what memory so many sequences need at once", min=1)] = None,
    tokens: Annotated[
        int | None, typer.Option(help="with --users: of each sequence, prompt and answer (default: 4096)", min=1)
    ] = None,
) -> Job:
    """Report, layer by layer, how a checkpoint runs with a paged cache, and why.

    The last line says whether the plugin is installed in transformers.
    """
    if users is None and tokens is not None:
        raise UsageError(f"--tokens {tokens} is for --users; add it, or leave --tokens out")
    chosen = None if weights is None else weights.value
    # Loaded within the job, whose errors are one line.
    load = partial(load_model, checkpoint, dtype.value, device, random_weights=config_only, weights=chosen)
    return lambda: _check(load, checkpoint, users, tokens or 4096)


def _check(load: Callable[[], Any], checkpoint: str, users: int | None, tokens: int) -> int:
    find_checkpoint(checkpoint)
    show("loading the model ...")
    from hf_paged.model.heads import with_head

    # As an engine computes it: with labels, or without a head.
    model = with_head(load())
    report = hf_paged.check(model)
    show("")
    print(report)
    if users is not None and (report.supported or report.engine_only):
        print(*needs(report, model, users, tokens), sep="\n")
    print(plugin_status())
    return 0 if report.supported else EXIT_REFUSED


def needs(report: hf_paged.SupportReport, model: Any, users: int, tokens: int) -> list[str]:
    """Return lines with the memory of so many sequences of so many tokens, and the flags that give it to them.

    Raises UsageError for a model with an encoder.
    """
    if report.has_encoder:
        raise UsageError(f"--users {users}: of models without an encoder only; {report.model} has one, leave it out")
    from hf_paged.cli.users import memory_for

    size, mib = memory_for(model, users, tokens), 2**20
    weights = sum(part.nbytes for part in {id(part): part for part in model.parameters()}.values())
    return [
        f"  {users:,} sequences of {tokens:,} tokens at once: {size / mib:,.1f} MiB of K/V and states, beside "
        f"{weights / mib:,.1f} MiB of weights",
        # In bytes: rounded up, the memory of a small model would hold some more.
        f"  flags: --kv-cache-memory {size} --max-num-seqs {users}; one sequence more waits",
    ]


def plugin_status() -> str:
    """One line: whether hf_paged handles `cache_implementation="paged"` in this process."""
    import transformers

    from hf_paged import plugin

    versions = f"hf_paged {hf_paged.__version__} in transformers {transformers.__version__}"
    if not plugin.is_installed():
        return f"plugin: not installed ({versions}); call hf_paged.install()"
    return f"plugin: installed ({versions}); a script of yours installs it with hf_paged.install()"
