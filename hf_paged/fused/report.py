"""The report of `hf_paged.check`: how a model runs, and which of its parts our kernels compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_paged.annotations import Model
from hf_paged.errors import UnsupportedModelError
from hf_paged.features.rows.row_trial import way_of
from hf_paged.features.watch.foreign import bare_copy, foreign_code
from hf_paged.fused.cpu.weights import rounded_layers
from hf_paged.fused.gpu.model import fused_parts, is_on_gpu, obstacle
from hf_paged.model import support
from hf_paged.model.heads import HeadModel, has_labels, with_head
from hf_paged.model.report import SupportReport
from hf_paged.model.state import unwrapped


def check(model: Model) -> SupportReport:
    """Report, layer by layer, how `cache_implementation="paged"` and the engine will run a model, and why.

    On a GPU it also says which parts of the model our kernels compute, or why none; on a CPU, how many layers they
    compute with weights in 8 or 4 bits. The first call runs the model on a few tokens, without gradients and without
    changing the model or the random state; the report is cached until the model's modules, dtype, device or hooks
    change.

    Args:
        model: A transformers model, or a PEFT model over one.

    Returns:
        A report whose text says everything: print it.

    Raises:
        TypeError: If `model` is not a transformers model. One from `torch.compile` is not (call `model.compile()`
            instead), nor a replica that nn.DataParallel makes.
        UnsupportedVersionError: If hf_paged does not run with this transformers.

    Example:
        ```python
        from transformers import AutoModelForCausalLM
        import hf_paged

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        report = hf_paged.check(model)
        assert report.supported and report.native
        print(report)
        ```
    """
    from transformers import PreTrainedModel

    model = unwrapped(model)
    if isinstance(model, PreTrainedModel):  # `_check` refuses others
        try:
            model = with_head(model)
        except UnsupportedModelError as error:
            return support.refused_report(model, str(error))
    report = _check(model)
    if isinstance(model, HeadModel) and (report.supported or report.engine_only):
        does = "classifies" if has_labels(model) else "embeds"
        reason = f"{report.reason}; it has no language-modelling head: the engine {does} with it"
        report = replace(report, reason=reason)
    # The engine may refuse what a call takes: it goes around methods that a call uses.
    if report.supported or report.engine_only:
        try:
            support.refuse_unsupported(model, by_engine=True)
        except UnsupportedModelError as error:
            report = replace(report, together=f"refused: {error}")
    return report


def _check(model: Model) -> SupportReport:
    report = support.check(model)
    model = unwrapped(model)
    if not report.native:
        return replace(report, **_together(model)) if report.supported or report.engine_only else report
    if not is_on_gpu(model):
        by_bits = rounded_layers(model)
        return replace(report, int8_layers=by_bits.get(8, 0), int4_layers=by_bits.get(4, 0))
    reason = obstacle(model)
    parts = fused_parts(model) if reason is None else None
    found = str(parts) if parts else f"nothing is computed in fewer launches: {reason or 'no part of it is known'}"
    return replace(report, fused=found)


_WORDS = {
    "any": "many sequences in one forward",
    "equal": "sequences of equal length in one forward, others one by one: with padding, its logits are others",
    "one": "one sequence at a time: beside other rows, its logits are others",
}


def _together(model: Model) -> dict[str, Any]:
    """Report how the engine computes a model that cannot run packed, and its states' sizes: fields of the report."""
    try:
        way = way_of(model, model if foreign_code(model).inside is None else bare_copy(model))
    except UnsupportedModelError as error:
        return {"together": f"refused: {error}"}
    words = _WORDS[way.decodes]
    if way.prompts != way.decodes:
        words += f"; prompts: {_WORDS[way.prompts]}"
    if way.by_tables:
        words += "; attention by block tables"
    return {"together": words, "state_bytes": (sum(way.state_bytes.values()), sum(way.bytes_per_token.values()))}
