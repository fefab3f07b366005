"""Loads a checkpoint for a command or a server, with errors of one line that name it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import pkgutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("hf_paged")

# What a name alone means for --quantization: weights in int8, as transformers' own configurations.
_INT8: dict[str, dict[str, Any]] = {
    "torchao": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
    },
    "quanto": {"quant_method": "quanto", "weights": "int8"},
}


DEQUANTISED = "dequantised"
"""For `weights` of `load_model`."""
_ACTIVATIONS = {"a16": 16, "a8": 8}
GGUF = ".gguf"
CODED_FORMATS = {
    GGUF: "hf_paged.serving.gguf_files:load_in_codes",
    "awq": "hf_paged.serving.gptq_files:load_in_codes",
    "gptq": "hf_paged.serving.gptq_files:load_in_codes",
    "bitsandbytes": "hf_paged.serving.bnb_files:load_in_codes",
    "torchao": "hf_paged.serving.torchao_files:load_in_codes",
}
"""Formats whose weights stay in codes on a CPU, by the `quant_method` of their configs: the place of a function of the
checkpoint, its config, the loader, the dtype and `source`. It returns the model and what is in codes, or why
transformers must load it."""


def quantization_of(given: str) -> dict[str, Any]:
    """The fields of the `quantization_config` for a name in `_INT8`, or for its JSON. Raises ValueError for others."""
    if given in _INT8:
        return _INT8[given]
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    if not isinstance(found, dict) or "quant_method" not in found:
        names = " or ".join(_INT8)
        raise ValueError(f"{given}: write {names}, or a quantization_config in JSON, with its quant_method")
    return found


def is_gguf(name: str) -> bool:
    """Return True if the name is that of a GGUF file: model, tokenizer and chat template in one."""
    return name.endswith(".gguf")


def pretrained(loader: Any, name: str, what: str, **kwargs: Any) -> Any:
    """`loader.from_pretrained(name)`, also of a GGUF file. Raises ValueError with the first line of the error."""
    from safetensors import SafetensorError

    errors: tuple[type[Exception], ...] = (OSError, ValueError, ImportError, SafetensorError)
    folder: contextlib.AbstractContextManager[str] = contextlib.nullcontext(name)
    reader: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if is_gguf(name):
        if importlib.util.find_spec("gguf") is None:
            raise ValueError(f"{name} is a GGUF file, and the package gguf is missing that reads it; pip install gguf")
        from hf_paged.serving.gguf_header import small_objects

        folder, reader, kwargs["gguf_file"] = _alone(Path(name)), small_objects(), Path(name).name
        # transformers takes what the file says for granted, so any error may come.
        errors = (Exception,)
    try:
        with folder as source, reader:
            made = loader.from_pretrained(source, **kwargs)
    except errors as error:
        raise ValueError(f"cannot load the {what} of {name}: {_reason(name, error)}") from error
    if is_gguf(name) and hasattr(made, "name_or_path"):
        made.name_or_path = name
    return made


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[str]:
    """A folder with nothing but this file. Beside it, transformers would read a tokenizer.json in place of the file's
    tokenizer, without the chat template. The hub's folders stay as they are."""
    if not file.is_file():
        yield str(file.parent)
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, file.name).symlink_to(file.resolve())
        yield folder


def _reason(name: str, error: Exception) -> str:
    """Return why a checkpoint cannot be loaded. Of a GGUF file that is cut off, transformers says neither that nor how
    much is missing."""
    if is_gguf(name):
        from hf_paged.serving.gguf_header import Header

        try:
            Header(Path(name))
        except ValueError as found:
            return str(found)
        except Exception:  # no such file, or anything else that the file says wrongly
            pass
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def load_model(
    checkpoint: str,
    dtype: str = "auto",
    device: str | None = None,
    *,
    random_weights: bool = False,
    num_ranks: int = 1,
    source: Mapping[str, Any] | None = None,
    quantization: Mapping[str, Any] | None = None,
    weights: str | None = None,
) -> Any:
    """The model in eval mode. Raises ValueError if it cannot be loaded, or the device cannot be used.

    dtype: of the weights ("auto": as they are stored). device: None = a GPU if there is one. num_ranks: of the
    processes that call this together, each of which gets its part of the weights. source: `revision` and
    `trust_remote_code` of from_pretrained. quantization: the fields of a `quantization_config` of transformers, which
    quantises the weights as they are loaded. weights: "int8", "int4", "w8a16", "w4a16", "w8a8" or "w4a8", to which they
    are rounded, in groups; "dequantised": of a GGUF file, plain ones; None: those of such a file stay in its codes on a
    CPU; "a16", "a8": so, and kernels round activations.
    """
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    from hf_paged.fused.cpu.coded import round_activations

    # A log is no place for bars.
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    source = dict(source or {})
    # The configuration first: it is small, and decides the class and whether the ranks fit.
    config = pretrained(AutoConfig, checkpoint, "configuration", **source)
    loader = _loader(config)
    if num_ranks > 1:
        check_ranks(config, num_ranks)
        return _load_part(loader, checkpoint, config, dtype, num_ranks, source)
    target = _device(device)
    method = _quant_method(config)
    form = GGUF if is_gguf(checkpoint) else method
    stays = weights is None or weights in _ACTIVATIONS
    if form != GGUF and (weights == DEQUANTISED or (form in CODED_FORMATS and not stays)):
        what = f"in {method} already" if method else "no GGUF file"
        raise ValueError(f"--weights {weights}: {checkpoint} is {what}; leave it out")
    reason = "the device is no CPU" if target.type != "cpu" else "other options choose its weights"
    reason = reason if stays else f"--weights {weights}"
    if form in CODED_FORMATS and stays and (quantization, random_weights, target.type) == (None, False, "cpu"):
        made, reason = _in_codes(CODED_FORMATS[form], checkpoint, config, loader, dtype, source)
        if made is not None:
            if weights is not None:
                try:
                    round_activations(made, _ACTIVATIONS[weights])
                except ValueError as error:
                    raise ValueError(f"--weights {weights}: {checkpoint}: {error}; leave it out") from None
            return made.eval()
    if weights in _ACTIVATIONS:
        why = reason if form in CODED_FORMATS else "its weights are in no codes"
        other = f", or give w8{weights}" if form == GGUF or form not in CODED_FORMATS else ""
        raise ValueError(f"--weights {weights}: {checkpoint} cannot be read so ({why}); leave it out{other}")
    if random_weights:
        chosen = config.dtype or torch.float32 if dtype == "auto" else getattr(torch, dtype)
        trusts = source.get("trust_remote_code", False)
        model = loader.from_config(config, dtype=chosen, trust_remote_code=trusts)
    else:
        model = pretrained(
            loader, checkpoint, "model", config=config, dtype=dtype, **source, **_quantised(quantization)
        )
    if is_gguf(checkpoint):
        _widened(model, checkpoint, reason)
    # Some quantised models refuse to be moved at all.
    model = (model if model.device == target else model.to(target)).eval()
    if weights not in (None, DEQUANTISED):
        from hf_paged.fused.cpu.weights import round_new

        round_new(model, weights)
    return model


def _quant_method(config: Any) -> str | None:
    """The format of a checkpoint's weights, None for plain ones."""
    fields = getattr(config, "quantization_config", None)
    fields = fields if fields is None or isinstance(fields, dict) else fields.to_dict()
    method = None if fields is None else fields.get("quant_method")
    return getattr(method, "value", method)


def _in_codes(
    reader: str, checkpoint: str, config: Any, loader: Any, dtype: str, source: Mapping[str, Any]
) -> tuple[Any, str]:
    """The model with its weights as they lie in the file; else None, and why transformers must load it."""
    import torch

    from hf_paged.fused.cpu.ops import is_available

    chosen = config.dtype or torch.float32 if dtype == "auto" else getattr(torch, dtype)
    if not is_available(chosen):
        return None, f"there are no native kernels for {chosen}"
    found: tuple[Any, str] | str
    try:
        found = pkgutil.resolve_name(reader)(checkpoint, config, loader, chosen, source)
    # A file says sizes and types, which are taken for granted, so any error may come.
    except Exception as error:
        raise ValueError(f"cannot load the model of {checkpoint}: {_first_line(error)}") from error
    if isinstance(found, str):
        return None, found
    model, kept = found
    log.warning("%s: %s", checkpoint, kept)
    return model, ""


def _widened(model: Any, checkpoint: str, reason: str) -> None:
    """Note that transformers has dequantised the weights of a GGUF file: they are plain ones, and can be saved."""
    model.hf_quantizer, model.is_quantized = None, False
    vars(model.config).pop("quantization_config", None)
    held, file = sum(each.nbytes for each in model.parameters()), Path(checkpoint).stat().st_size
    log.warning(
        "%s: its %d MiB are read into weights of %s, which take %d MiB (%s)",
        checkpoint, file >> 20, model.dtype, held >> 20, reason,
    )  # fmt: skip


# Ends of the names of classes that have labels in place of a language model's head.
_LABELLED = ("ForSequenceClassification", "ForTokenClassification")


def _loader(config: Any) -> Any:
    """The auto class of the model: that of the class from which the checkpoint was saved, as far as one is named."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as WRITES
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as SEES
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING as ANSWERS
    from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING as HEARS
    from transformers.models.auto.modeling_auto import MODEL_MAPPING as BARE

    kind, saved = type(config), (config.architectures or [""])[0]
    for name in _LABELLED:
        if saved.endswith(name):
            return getattr(transformers, f"AutoModel{name}")
    # Other kinds, such as Whisper's, are saved by their bare class too, and have no use without their head.
    if kind in WRITES and getattr(BARE.get(kind, None), "__name__", None) == saved:
        return transformers.AutoModel
    if kind in HEARS:
        return transformers.AutoModelForSpeechSeq2Seq
    if kind in SEES and kind not in WRITES and not config.is_encoder_decoder:
        return transformers.AutoModelForImageTextToText
    if config.is_encoder_decoder or (kind in ANSWERS and kind not in WRITES):  # also AudioFlamingo3 and Qwen2Audio
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def _quantised(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of from_pretrained."""
    if fields is None:
        return {}
    from transformers.quantizers.auto import AutoQuantizationConfig

    try:
        return {"quantization_config": AutoQuantizationConfig.from_dict(dict(fields))}
    except Exception as error:  # of any package
        raise ValueError(f"quantization {dict(fields)} cannot be used: {error}") from error


def check_ranks(config: Any, num_ranks: int) -> None:
    """Raises ValueError if the heads of the model cannot be shared out evenly to so many ranks."""
    text = config.get_text_config(decoder=True)
    heads: int | None = getattr(text, "num_attention_heads", None)
    kv_heads: int = getattr(text, "num_key_value_heads", None) or heads or 0
    if not heads or (heads % num_ranks == 0 and kv_heads % num_ranks == 0):
        return
    possible = [str(n) for n in range(1, kv_heads + 1) if heads % n == 0 and kv_heads % n == 0]
    counted = f"{heads} heads" if heads == kv_heads else f"{heads} heads with {kv_heads} K/V heads"
    use = " or ".join([", ".join(possible[:-1]), possible[-1]] if len(possible) > 1 else possible)
    raise ValueError(f"--tensor-parallel-size {num_ranks}: {counted} are not divisible by {num_ranks}; use {use}")


def _load_part(loader: Any, checkpoint: str, config: Any, dtype: str, num_ranks: int, source: Mapping[str, Any]) -> Any:
    from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]  # exported lazily

    spread = DistributedConfig(tp_size=num_ranks)
    return pretrained(
        loader, checkpoint, "model", config=config, dtype=dtype, distributed_config=spread, **source
    ).eval()


def _device(name: str | None) -> Any:
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # Names of devices that are not there are accepted until memory is asked for.
        torch.empty(0, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the device {name} cannot be used here ({reason}); 'cpu' always can") from None
    return device
