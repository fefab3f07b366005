"""`hf-paged generate`: generates texts for prompts, and prints their cost.

Loads a checkpoint and calls transformers' `generate` with a paged cache. transformers checks its own options
(`GenerationConfig.validate`). Uses the public API; knows nothing of blocks or kernels.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

import hf_paged
from hf_paged.annotations import Tokenizer
from hf_paged.cli.common import (
    Checkpoint,
    Device,
    DType,
    DTypeOption,
    Job,
    Revision,
    TrustRemoteCode,
    UsageError,
    Weights,
    WeightsOption,
    check_tensor_parallel,
    find_checkpoint,
    option,
    show,
    source_of,
    without_none,
)
from hf_paged.cli.figures import figures_of, render
from hf_paged.cli.ranks import TensorParallel, is_rank, on_ranks, read_input, shared_seed
from hf_paged.serving.checkpoints import is_gguf, load_model, pretrained
from hf_paged.serving.templates import reads_parts

# transformers' default, a length of 20 tokens with the prompt, cuts off most answers.
DEFAULT_NEW_TOKENS = 128
# Not 0, so that `--compare` can be a check in a script.
EXIT_DIFFERENT = 1


def _count(text: str, *, minimum: int = 0) -> Any:
    return typer.Option(help=text, min=minimum)


def _share(text: str) -> Any:
    return typer.Option(help=text, min=0.0, max=1.0)


# Ranges are checked here if transformers silently accepts a value outside, or takes it for "off".
def generate(
    context: typer.Context,
    checkpoint: Checkpoint,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="default: standard input, one prompt per line")
    ] = None,
    file: Annotated[str | None, typer.Option(help="read prompts from this file, one per line; - is stdin")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="put each prompt into the chat template as the user's message (default: if the tokenizer has one)",
        ),
    ] = None,
    image: Annotated[list[str] | None, option("file of an image, for each prompt; may be given several times")] = None,
    audio: Annotated[list[str] | None, option("audio file, for each prompt; may be given several times")] = None,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
    weights: WeightsOption = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    tensor_parallel_size: TensorParallel = 1,
    max_new_tokens: Annotated[
        int | None, _count(f"maximum number of tokens to generate (default: {DEFAULT_NEW_TOKENS})", minimum=1)
    ] = None,
    min_new_tokens: Annotated[int | None, _count("minimum number of tokens to generate")] = None,
    num_beams: Annotated[int | None, _count("number of beams", minimum=1)] = None,
    num_return_sequences: Annotated[int | None, _count("number of texts per prompt", minimum=1)] = None,
    length_penalty: Annotated[float | None, option("exponent of the length that divides a beam's score")] = None,
    early_stopping: Annotated[bool | None, option("beam search: stop as soon as enough beams have ended")] = None,
    do_sample: Annotated[bool | None, option("sample instead of greedy search")] = None,
    temperature: Annotated[float | None, option("sampling: divides the logits")] = None,
    top_k: Annotated[int | None, _count("sampling: keep the k likeliest tokens (0: all)")] = None,
    top_p: Annotated[float | None, _share("sampling: keep the likeliest tokens of this total probability")] = None,
    min_p: Annotated[float | None, _share("sampling: keep tokens this likely, relative to the likeliest")] = None,
    typical_p: Annotated[float | None, _share("sampling: keep locally typical tokens of this probability")] = None,
    repetition_penalty: Annotated[float | None, option("above 1: tokens that have occurred are less likely")] = None,
    no_repeat_ngram_size: Annotated[int | None, _count("no run of this many tokens occurs twice")] = None,
    stop_strings: Annotated[list[str] | None, option("stop a text after this; may be given several times")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the random numbers (torch.manual_seed)")] = None,
    block_size: Annotated[int | None, typer.Option(help="tokens in a block of the cache (default: 16)")] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="maximum number of blocks of the cache (default: no limit)")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="prompts generated together; one with --stream, --image or --audio", min=1)
    ] = 32,
    stream: Annotated[bool, typer.Option("--stream", help="print each text as it is generated, one by one")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="run plain generate too; the exit status is 1 if a text differs")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per prompt, then the figures")] = False,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="print figures of speed and memory")] = True,
) -> Job:
    """Generate text with any transformers checkpoint, from a paged KV cache.

    Prints the texts, then one block of figures: tokens per second, blocks, and K/V memory. Options that have the name
    of a field of transformers' GenerationConfig have its meaning.
    """
    # What is not given is left to the checkpoint's defaults.
    given = {name: context.params[name] for name in _GENERATION_OPTIONS if context.params[name] not in (None, [], ())}

    source = source_of(revision, trust_remote_code)

    # Prompts are read and the checkpoint is loaded within the ranks, not in the process that starts them.
    def work() -> int:
        call = _Call(
            prompts=_read_prompts(list(prompts or ()), file),
            options=given,
            cache_config=hf_paged.CacheConfig(**without_none(block_size=block_size, num_blocks=num_blocks)),
            batch_size=1 if stream or image or audio else batch_size,
            stream=stream,
            as_json=as_json,
            compare=compare,
            images=tuple(image or ()),
            recordings=tuple(audio or ()),
        )
        loaded = _load(call, checkpoint, dtype, device, chat, tensor_parallel_size, source, weights)
        # Without a seed each rank would draw other tokens.
        return _run(call, loaded, shared_seed() if seed is None and is_rank() else seed, stats)

    def job() -> int:
        find_checkpoint(checkpoint)
        if tensor_parallel_size > 1 and (image or audio):
            raise UsageError(
                f"--image and --audio are for one process; drop --tensor-parallel-size {tensor_parallel_size}"
            )
        if tensor_parallel_size > 1 and weights is not None:
            raise UsageError(
                f"--weights {weights.value} is for one process; drop --tensor-parallel-size {tensor_parallel_size}"
            )
        check_tensor_parallel(tensor_parallel_size, device, checkpoint, source)
        return on_ranks(tensor_parallel_size, work, needs_input=_reads_input(prompts, file))

    return job


_GENERATION_OPTIONS = (
    "max_new_tokens",
    "min_new_tokens",
    "num_beams",
    "num_return_sequences",
    "length_penalty",
    "early_stopping",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "stop_strings",
)


@dataclass(frozen=True, slots=True)
class _Call:
    """The user's request. `options`: the given options of GenerationConfig. `images`, `recordings`: files."""

    prompts: list[str]
    options: dict[str, Any]
    cache_config: hf_paged.CacheConfig
    batch_size: int
    stream: bool
    as_json: bool
    compare: bool
    images: tuple[str, ...] = ()
    recordings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A checkpoint and the encoded prompts. `options`: those of the call, with a length. `inputs`: what the model takes
    beside each prompt."""

    model: Any
    tokenizer: Tokenizer
    ids: list[list[int]]
    options: dict[str, Any]
    pad_token_id: int
    inputs: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Answer:
    """One generated text."""

    text: str
    num_tokens: int
    finish_reason: str
    tokens: tuple[int, ...]


# -- arguments -----------------------------------------------------------------------------------------------------


def _read_prompts(prompts: list[str], source: str | None) -> list[str]:
    places = [f"prompt {number}" for number in range(1, len(prompts) + 1)]
    if source is None and _reads_input(prompts, source):
        source = "-"
    if source is not None:
        where = "standard input" if source == "-" else source
        try:
            text = read_input() if source == "-" else Path(source).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"{where} is not UTF-8 text; convert it first") from None
        except OSError as error:
            raise UsageError(f"cannot read prompts from {where}: {error.strerror}") from None
        # Not by splitlines, which divides at characters that a prompt may have, such as U+2028.
        lines = text.split("\n")
        if lines[-1] == "":
            lines.pop()
        prompts = prompts + lines
        places += [f"line {number} of {where}" for number in range(1, len(lines) + 1)]
    if not prompts:
        raise UsageError("no prompt given; type one after the checkpoint, or use --file or standard input")
    for prompt, place in zip(prompts, places):
        if not prompt.strip():
            raise UsageError(f"{place} is empty ({prompt!r}); give it some text, or leave it out")
    return prompts


def _reads_input(prompts: list[str] | None, source: str | None) -> bool:
    return source == "-" or (source is None and not prompts and (is_rank() or not sys.stdin.isatty()))


def _check_options(call: _Call, defaults: Any) -> None:
    """Raise ValueError or UsageError for options that contradict each other.

    defaults: the checkpoint's GenerationConfig, which applies to options that are not given.
    """
    from transformers import GenerationConfig

    # With the defaults of the checkpoint, because these apply beside what is given.
    options = {"do_sample": bool(defaults.do_sample), "num_beams": defaults.num_beams or 1, **call.options}
    GenerationConfig(**options).validate(strict=True)
    minimum, maximum = options.get("min_new_tokens", 0), options.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    if minimum > maximum:
        raise UsageError(f"--min-new-tokens {minimum} is more than --max-new-tokens {maximum}; raise the latter")
    for name in ("num_beams", "num_return_sequences"):
        if call.stream and options.get(name, 1) > 1:
            option = f"--{name.replace('_', '-')} {options[name]}"
            raise UsageError(f"--stream shows one text a prompt while it grows, {option} has several; drop one of them")
    if call.stream and call.as_json:
        raise UsageError("--stream and --json contradict each other; drop one of them")
    if call.stream and call.compare:
        raise UsageError("--stream and --compare contradict each other; drop one of them")


# -- loading -------------------------------------------------------------------------------------------------------


def _load(
    call: _Call,
    checkpoint: str,
    dtype: DType,
    device: str | None,
    chat: bool | None,
    num_ranks: int,
    source: dict[str, Any],
    weights: Weights | None,
) -> _Loaded:
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig

    # Load the small files first, so that most mistakes are reported before the weights are read.
    pretrained(AutoConfig, checkpoint, "configuration", **source)
    defaults = GenerationConfig()
    with contextlib.suppress(OSError):
        # A checkpoint without this file has no defaults of its own; beside a GGUF file it is another model's.
        defaults = defaults if is_gguf(checkpoint) else GenerationConfig.from_pretrained(checkpoint, **source)
    _check_options(call, defaults)
    tokenizer = pretrained(AutoTokenizer, checkpoint, "tokenizer", **source)
    processor = None
    if call.images or call.recordings:
        processor = pretrained(AutoProcessor, checkpoint, "processor", **source)
    # A processor's template knows media; the tokenizer's may not.
    template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    chat = bool(template) if chat is None else chat
    if chat and not template:
        raise UsageError(f"--chat: the tokenizer of {checkpoint} has no chat template; drop --chat")
    show("loading the model ...")
    chosen = None if weights is None else weights.value
    model = load_model(checkpoint, dtype.value, device, num_ranks=num_ranks, source=source, weights=chosen)
    _refuse_unsupported(model)
    if processor is None:
        in_parts = chat and reads_parts(tokenizer, None)
        encoded = (_encode(tokenizer, prompt, chat=chat, in_parts=in_parts) for prompt in call.prompts)
        rows = [(ids, dict[str, Any]()) for ids in encoded]
    else:
        rows = _with_media(call, model, processor, template if chat else None)
    ids = [row[0] for row in rows]
    options = _with_length(model, ids, call.options)
    # In plain rows padding is masked, so that any token will do.
    candidates = (model.generation_config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad = next(token for token in candidates if token is not None)
    return _Loaded(model, tokenizer, ids, options, pad, [row[1] for row in rows])


def _refuse_unsupported(model: Any) -> None:
    report = hf_paged.check(model)
    if not report.supported:
        raise UsageError(f"{report.model} cannot use a paged cache: {report.reason}")


def _encode(tokenizer: Tokenizer, prompt: str, *, chat: bool, in_parts: bool) -> list[int]:
    # verbose=False: a prompt that is too long gets our error, not the tokenizer's warning.
    if chat:
        content = [{"type": "text", "text": prompt}] if in_parts else prompt
        message = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return list(tokenizer(prompt, verbose=False)["input_ids"])


def _with_media(
    call: _Call, model: Any, processor: Any, template: str | None
) -> list[tuple[list[int], dict[str, Any]]]:
    """Return each prompt's token ids, media before the text, and the model's inputs for the media. template: of
    a chat (None: the prompt has the placeholders). Raises UsageError for files that cannot be read or taken."""
    import jinja2

    from hf_paged.serving.attachments import Attached, rate_of
    from hf_paged.serving.media_reader import CannotDecode, read_audio, read_image
    from hf_paged.serving.served import kinds_of, row_of
    from hf_paged.serving.settings import Limits

    limits = Limits(image_pixels=2**62, audio_seconds=1e9, audio_decode_seconds=1e9)  # the user's own files
    rate = rate_of(processor)
    # The files are the same for each prompt, so they are read once.
    attached = Attached(rate=rate)
    for flag, kind, files in (("--image", "image", call.images), ("--audio", "audio", call.recordings)):
        for name in files:
            if kind not in kinds_of(model, processor):
                raise UsageError(f"{flag} {name}: {type(model).__name__} takes none; drop {flag}")
            try:
                data = Path(name).read_bytes()
                if kind == "image":
                    attached.images.append(read_image(data, limits))
                else:
                    attached.recordings.append(read_audio(data, rate, limits))
            except OSError as error:
                raise UsageError(f"{flag} {name}: {error.strerror}; give a file that can be read") from None
            except CannotDecode as error:
                raise UsageError(f"{flag} {name}: {error}") from None
    media = [{"type": "image"}] * len(attached.images) + [{"type": "audio"}] * len(attached.recordings)
    rows = []
    for prompt in call.prompts:
        messages = [{"role": "user", "content": [*media, {"type": "text", "text": prompt}]}]
        try:
            text = prompt
            if template:
                text = processor.tokenizer.apply_chat_template(
                    messages, chat_template=template, add_generation_prompt=True, tokenize=False
                )
            made = processor(text=[text], return_tensors="pt", add_special_tokens=not template, **attached.arguments())
            rows.append(row_of(made, model.dtype))
        except (jinja2.TemplateError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
            raise UsageError(f"the processor refuses the prompt {prompt[:40]!r} with these files: {error}") from None
    return rows


def _with_length(model: Any, ids: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    """The options, with a default `max_new_tokens` if neither they nor the checkpoint set a length.

    Raises UsageError or ValueError for prompts that the model cannot take, and for a length beyond its positions.
    """
    import torch

    from hf_paged.generation.validation import check_prompts, position_limit

    # Each one by itself, so that the error names the prompt.
    for number, prompt in enumerate(ids, 1):
        check_prompts(model, torch.tensor([prompt], dtype=torch.int64, device="cpu"), f"prompt {number}")
    limit, longest = position_limit(model), max(map(len, ids))
    given = options.get("max_new_tokens")
    if given is not None:
        if limit is not None and longest + given - 1 > limit:  # the last token is never read
            raise UsageError(
                f"--max-new-tokens {given} after a prompt of {longest} tokens passes the model's limit of {limit}; "
                f"use {limit - longest} or less, or a shorter prompt"
            )
        return options
    defaults = model.generation_config
    # The checkpoint's length, as `generate` has it.
    if defaults.max_new_tokens is not None or defaults.max_length is not None:
        return options
    room = DEFAULT_NEW_TOKENS if limit is None else max(1, limit - longest)
    return {**options, "max_new_tokens": min(DEFAULT_NEW_TOKENS, room)}


# -- generating ----------------------------------------------------------------------------------------------------


def _run(call: _Call, loaded: _Loaded, seed: int | None, stats: bool) -> int:
    import torch

    if seed is not None:
        torch.manual_seed(seed)
    generated, seconds, plain = 0, 0.0, _Plain()
    if call.compare:
        for paged in (True, False):  # what a first call alone does is not compared
            _generate_batch(replace(call, stream=False), loaded, [0], paged=paged, few=True)
        # Both runs of a batch begin with the same random numbers.
        seed = torch.initial_seed() if seed is None else seed
    with hf_paged.record_calls() as records:
        for start in range(0, len(loaded.ids), call.batch_size):
            batch = range(len(loaded.ids))[start : start + call.batch_size]
            if call.stream:
                _print_header(call, start)
            # Anew for each batch, because the plain run of the one before has drawn numbers too.
            if call.compare and seed is not None:
                torch.manual_seed(seed + start)
            began = time.perf_counter()
            answers = _generate_batch(call, loaded, batch)
            seconds += time.perf_counter() - began
            if call.compare and seed is not None:
                torch.manual_seed(seed + start)
                began = time.perf_counter()
                own = _generate_batch(call, loaded, batch, paged=False)
                plain.add(answers, own, time.perf_counter() - began)
            generated += sum(answer.num_tokens for row in answers for answer in row)
            for index, row in enumerate(answers, start):
                if not call.stream:
                    _print_answers(call, index, row)
    if stats:
        figures = figures_of(records, generated, sum(map(len, loaded.ids)), seconds)
        if call.compare:
            figures["plain"] = {"seconds": round(plain.seconds, 4), "equal": plain.equal, "texts": plain.texts}
        print(json.dumps({"stats": figures}) if call.as_json else render(figures))
    return 0 if plain.equal == plain.texts else EXIT_DIFFERENT


@dataclass(slots=True)
class _Plain:
    """Results of plain `generate` for the same prompts. equal: how many of the `texts` have the same tokens."""

    seconds: float = 0.0
    equal: int = 0
    texts: int = 0

    def add(self, paged: list[list[_Answer]], own: list[list[_Answer]], seconds: float) -> None:
        pairs = [(a, b) for rows in zip(paged, own) for a, b in zip(*rows)]
        self.seconds += seconds
        self.texts += len(pairs)
        self.equal += sum(a.tokens == b.tokens for a, b in pairs)


def _generate_batch(
    call: _Call, loaded: _Loaded, places: Sequence[int], *, paged: bool = True, few: bool = False
) -> list[list[_Answer]]:
    """For each prompt of a batch, by its place, its `num_return_sequences` answers. paged: not by plain `generate`.
    few: two tokens."""
    import torch
    from transformers import TextStreamer

    model, tokenizer, batch = loaded.model, loaded.tokenizer, [loaded.ids[place] for place in places]
    width = max(map(len, batch))
    integers: Any = {"dtype": torch.int64, "device": model.device}
    # Padded on the left, because answers continue at the right end.
    rows = torch.tensor([[loaded.pad_token_id] * (width - len(ids)) + ids for ids in batch], **integers)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in batch], **integers)
    kwargs: dict[str, Any] = {**loaded.options, "pad_token_id": loaded.pad_token_id}
    if len(places) == 1:  # media are for one prompt at a time
        kwargs |= {name: value.to(model.device) for name, value in loaded.inputs[places[0]].items()}
    if paged:
        kwargs.update(cache_implementation="paged", cache_config=call.cache_config)
    if few:
        kwargs.update(max_new_tokens=2, min_new_tokens=None)
    if "stop_strings" in kwargs:
        kwargs["tokenizer"] = tokenizer
    if call.stream:
        kwargs["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        with _progress(model, enabled=not call.stream):
            output = model.generate(rows, attention_mask=mask, **kwargs)
    except hf_paged.OutOfBlocks as error:
        raise UsageError(
            f"--num-blocks {call.cache_config.num_blocks} is too few for {len(batch)} prompts at once ({error.needed} "
            f"more needed at {error.available} free); give more, or a smaller --batch-size"
        ) from error
    answers = [_answer(loaded, tokens) for tokens in output[:, width:].tolist()]
    each = len(answers) // len(batch)
    return [answers[i : i + each] for i in range(0, len(answers), each)]


def _answer(loaded: _Loaded, tokens: list[int]) -> _Answer:
    """The text and length of a row of new tokens, without the padding after its end."""
    eos = loaded.model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    length, reason = len(tokens), "length"
    for position, token in enumerate(tokens):
        if token in ends:
            length, reason = position + 1, "eos"
            break
    else:
        # Only rows that end before others are padded: after a stop string, if not after EOS.
        while length and tokens[length - 1] == loaded.pad_token_id:
            length, reason = length - 1, "stop"
    text = loaded.tokenizer.decode(tokens[:length], skip_special_tokens=True)
    if reason == "length" and any(text.endswith(stop) for stop in loaded.options.get("stop_strings", ())):
        reason = "stop"
    return _Answer(text, length, reason, tuple(tokens[:length]))


# -- output --------------------------------------------------------------------------------------------------------


def _print_header(call: _Call, index: int) -> None:
    print(f"[{index + 1}/{len(call.prompts)}] {call.prompts[index]}", flush=True)


def _print_answers(call: _Call, index: int, answers: list[_Answer]) -> None:
    if call.as_json:
        outputs = [
            {"text": answer.text, "num_tokens": answer.num_tokens, "finish_reason": answer.finish_reason}
            for answer in answers
        ]
        print(json.dumps({"prompt": call.prompts[index], "outputs": outputs}, ensure_ascii=False), flush=True)
        return
    _print_header(call, index)
    for number, answer in enumerate(answers, 1):
        print(f"({number}) {answer.text}" if len(answers) > 1 else answer.text)
    print(flush=True)


@contextlib.contextmanager
def _progress(model: Any, *, enabled: bool) -> Iterator[None]:
    """Show the number of the model's forwards on a terminal. A forward hook counts them in every decoding mode."""
    show("")
    if not (enabled and sys.stderr.isatty()):
        yield
        return
    steps, shown = 0, 0.0

    def count(*_: Any) -> None:
        nonlocal steps, shown
        steps += 1
        if time.perf_counter() - shown > 0.1:
            shown = time.perf_counter()
            show(f"generating: step {steps}")

    hook = model.register_forward_hook(count)
    try:
        yield
    finally:
        hook.remove()
        show("")
