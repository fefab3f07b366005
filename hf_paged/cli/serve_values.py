"""Values of the flags of `hf-paged serve`, read before a model is loaded, so that mistakes are told at once."""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hf_paged
from hf_paged.cli.common import UsageError
from hf_paged.cli.replicas import engine_options
from hf_paged.policies import Fair


class Policy(StrEnum):
    fcfs = "fcfs"
    priority = "priority"
    fair = "fair"


def settings_of(given: dict[str, Any]) -> Any:
    """Make the server's settings of the flags. Raises UsageError."""
    from hf_paged.serving.settings import Limits, Settings

    largest = max(given["max_body_bytes"], given["max_audio_bytes"])
    return Settings(
        names=tuple(given["served_model_name"] or [given["checkpoint"]]),
        api_keys=tuple(given["api_key"] or ()),
        max_model_len=given["max_model_len"],
        defaults=given["generation_config"].value,
        chat_template=_read("--chat-template", given["chat_template"]),
        response_template=_response_template(given["response_template"]),
        admin_key=given["admin_key"],
        weights_folders=tuple(given["weights_folder"] or ()),
        priorities=given["scheduling_policy"] is not Policy.fcfs,
        # Without keys, pages of other hosts must not read answers.
        hosts=None if given["allow_no_key"] else (given["host"].lower(),),
        media_hosts=_hosts("allow_media_urls", given),
        private_media_hosts=_hosts("allow_private_media_hosts", given),
        logits_processors=_processors(given["logits_processor"] or []),
        limits=Limits(
            logprobs=given["max_logprobs"],
            in_flight=given["max_in_flight"],
            new_tokens=given["default_max_tokens"],
            request_seconds=given["max_request_seconds"],
            grammar_seconds=given["max_grammar_seconds"],
            audio_bytes=given["max_audio_bytes"],
            audio_seconds=given["max_audio_seconds"],
            body=given["max_body_bytes"],
            # Else the largest one would never be taken.
            bodies=max(2 * largest, Limits().bodies),
            media_memory=given["max_media_bytes"],
            **_media_limits(given["limit_mm_per_prompt"]),
        ),
    )


def _hosts(name: str, given: dict[str, Any]) -> tuple[str, ...]:
    """The hosts of an option that may be given several times, each time with several. Raises UsageError."""
    flag, hosts = f"--{name.replace('_', '-')}", [host for part in given[name] or [] for host in part.split(",")]
    if hosts and find_spec("httpx") is None:
        raise UsageError(f"{flag} needs httpx; in a checkout: pip install -e '.[media]'")
    return tuple(host.strip().lower() for host in hosts)


def _processors(pairs: list[str]) -> tuple[tuple[str, str], ...]:
    """Name and place of each registered processor. Raises UsageError."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, place = pair.partition("=")
        if not name.isidentifier() or ":" not in place or name in found:
            raise UsageError(f"--logits-processor {pair}: write NAME=module:Class, with a name of its own")
        found[name] = place
    return tuple(found.items())


def _media_limits(text: str | None) -> dict[str, int]:
    """Fields of Limits. Raises UsageError."""
    names = {"image": "images", "video": "videos", "audio": "recordings"}
    try:
        asked = json.loads(text or "{}")
        if not isinstance(asked, dict) or not asked.keys() <= names.keys():
            raise ValueError(f"write an object with the keys {', '.join(names)}")
    except ValueError as error:
        raise UsageError(f"--limit-mm-per-prompt {text}: {error}") from None
    return {names[kind]: count for kind, count in asked.items()}


def _read(flag: str, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path} cannot be read: {error}") from None


def _response_template(path: str | None) -> Any:
    text = _read("--response-template", path)
    if text is None:
        return None
    from hf_paged.serving.answer_format import AnswerFormat

    try:
        template = json.loads(text)
        AnswerFormat.of(template)
    except ValueError as error:
        raise UsageError(f"--response-template {path} cannot be used: {error}") from None
    return template


def quantization_in(given: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of transformers' configuration. Raises UsageError for what is none, or cannot be used together."""
    from hf_paged.serving.checkpoints import quantization_of

    if (text := given["quantization"]) is None:
        return None
    check_one_process(f"--quantization {text}", given)
    try:
        return quantization_of(text)
    except ValueError as error:
        raise UsageError(f"--quantization {error}") from None


def weights_of(given: dict[str, Any]) -> str | None:
    """Return what the weights are rounded to. Raises UsageError if it is for one process or device."""
    if given["weights"] is None:
        return None
    check_one_process(f"--weights {given['weights'].value}", given)
    chosen: str = given["weights"].value
    if given["quantization"] is not None:
        raise UsageError(f"--weights {chosen} and --quantization both round the weights; leave one out")
    return chosen


def speculative_of(given: dict[str, Any]) -> Any:
    """Read the configuration of drafts, or return None. Raises UsageError if it is wrong or needs one process."""
    if (text := given["speculative_config"]) is None:
        return None
    from hf_paged.serving.speculative import SpeculativeConfig

    check_one_process(f"--speculative-config {text}", given)
    try:
        return SpeculativeConfig.of(text)
    except ValueError as error:
        raise UsageError(f"--speculative-config {error}") from None


def configs_of(given: dict[str, Any]) -> tuple[hf_paged.CacheConfig, hf_paged.SchedulerConfig]:
    """Make the configs of the options. Raises UsageError or ValueError for a value that they do not take."""
    cache, scheduler = engine_options(given)
    weights = _key_weights(given)
    if weights:
        scheduler["policy"] = Fair(weights)
    return hf_paged.CacheConfig(**cache), hf_paged.SchedulerConfig(**scheduler)


def _key_weights(given: dict[str, Any]) -> dict[str, float]:
    """Return the weight of each API key, by the name that its requests have. Raises UsageError."""
    if (text := given["key_weights"]) is None:
        return {}
    check_one_process(f"--key-weights {text}", given)
    keys, flag = given["api_key"] or [], f"--key-weights {text}"
    if given["scheduling_policy"] is not Policy.fair or len(keys) < 2:
        raise UsageError(f"{flag} is for --scheduling-policy fair and two or more --api-key")
    try:
        weights = [float(part) for part in text.split(",")]
        Fair(dict(zip(keys, weights)))
    except ValueError:
        weights = []
    if len(weights) != len(keys):
        raise UsageError(f"{flag}: write a positive number for each of the {len(keys)} keys, such as 1,4")
    return {hashlib.sha256(key.encode()).hexdigest(): weight for key, weight in zip(keys, weights)}


def check_one_process(option: str, given: dict[str, Any]) -> None:
    """Raise UsageError if this option is given with several ranks or replicas."""
    for name, default in (("tensor_parallel_size", 1), ("replicas", None)):
        if given[name] != default:
            raise UsageError(f"{option} is for one process; leave --{name.replace('_', '-')} {given[name]} out")


def adapters_of(pairs: list[str], names: tuple[str, ...]) -> dict[str, str]:
    """Return the folder of each adapter by its name. Raises UsageError or ValueError for what is not an adapter."""
    if not pairs:  # the check needs torch
        return {}
    from hf_paged.serving.adapter_files import check_adapter

    adapters: dict[str, str] = {}
    for pair in pairs:
        name, separator, folder = pair.partition("=")
        if not (name and separator and folder):
            raise UsageError(f"--adapter {pair}: write NAME=FOLDER")
        if name in adapters or name in names:
            raise UsageError(f"--adapter {pair}: the name {name!r} is taken")
        check_adapter(folder)
        adapters[name] = folder
    return adapters
