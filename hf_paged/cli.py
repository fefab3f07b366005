"""The command line: `hf-paged generate | check | build`.

Parses, loads a checkpoint, calls transformers' `generate` with a paged cache and prints. Imports torch and transformers
only once a command needs them. Knows the public names and nothing of blocks or kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hf_paged

if TYPE_CHECKING:
    from hf_paged import CallRecord

DEFAULT_NEW_TOKENS = 128
EXIT_REFUSED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141


class UsageError(Exception):
    """What the user typed cannot be done. One line: the value and the remedy."""


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            option = next((word for word in unknown.split() if word.startswith("-")), unknown)
            close = difflib.get_close_matches(option.split("=")[0], self._option_string_actions, n=1)
            message = f"unknown option {option}" + (f"; did you mean {close[0]}?" if close else "")
        raise UsageError(f"{message} (see '{self.prog} --help')")


# -- arguments -----------------------------------------------------------------------------------------------------

# Command-line options with the names of GenerationConfig: (type, what it does).
_GENERATION_OPTIONS: dict[str, tuple[type, str]] = {
    "max_new_tokens": (int, f"tokens to generate for each prompt (default: {DEFAULT_NEW_TOKENS})"),
    "min_new_tokens": (int, "tokens to generate at least"),
    "num_beams": (int, "beams of beam search"),
    "num_return_sequences": (int, "texts for each prompt"),
    "length_penalty": (float, "beam search: exponent of the length that divides a beam's score"),
    "temperature": (float, "sampling: divides the logits"),
    "top_k": (int, "sampling: keep the k likeliest tokens"),
    "top_p": (float, "sampling: keep the likeliest tokens of this total probability"),
    "min_p": (float, "sampling: keep tokens at least this likely, relative to the likeliest"),
    "typical_p": (float, "sampling: keep locally typical tokens of this total probability"),
    "repetition_penalty": (float, "above 1: tokens that have occurred become less likely"),
    "no_repeat_ngram_size": (int, "no run of this many tokens occurs twice"),
}
_SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "typical_p")

# transformers takes some of these values for "off" without a word.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_new_tokens": (lambda x: x >= 1, "at least 1"),
    "min_new_tokens": (lambda x: x >= 0, "0 or more"),
    "num_beams": (lambda x: x >= 1, "at least 1"),
    "num_return_sequences": (lambda x: x >= 1, "at least 1"),
    "temperature": (lambda x: x > 0, "a number above 0"),
    "top_k": (lambda x: x >= 0, "at least 1, or 0 for no limit"),
    "top_p": (lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "min_p": (lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "typical_p": (lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "repetition_penalty": (lambda x: x > 0, "a number above 0"),
    "no_repeat_ngram_size": (lambda x: x >= 0, "0 or more"),
}


def _parsers() -> dict[str, tuple[_Parser, Callable[[argparse.Namespace], int]]]:
    def new(name: str, description: str) -> _Parser:
        return _Parser(prog=f"hf-paged {name}", description=description, allow_abbrev=False)

    generate = new("generate", "Generate text with any transformers checkpoint, from a paged KV cache.")
    _add_checkpoint(generate)
    generate.add_argument("prompts", metavar="PROMPT", nargs="*", help="a prompt (default: standard input, one a line)")
    generate.add_argument("--file", help="read prompts from this file, one a line; - is standard input")
    generate.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put each prompt into the chat template as the user's message (default: if the tokenizer has one)",
    )
    options = generate.add_argument_group("generation options, as in transformers' GenerationConfig")
    for name, (kind, text) in _GENERATION_OPTIONS.items():
        options.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    options.add_argument("--do-sample", action=argparse.BooleanOptionalAction, help="sample instead of greedy search")
    options.add_argument("--early-stopping", action=argparse.BooleanOptionalAction, help="beam search: stop early")
    options.add_argument("--stop-strings", nargs="+", metavar="TEXT", help="stop a text after one of these")
    options.add_argument("--seed", type=int, help="seed of the random numbers (torch.manual_seed)")
    memory = generate.add_argument_group("memory and batching")
    memory.add_argument("--block-size", type=int, help="tokens in a block of the cache (default: 16)")
    memory.add_argument("--num-blocks", type=int, help="blocks of the cache at most (default: as many as needed)")
    memory.add_argument("--batch-size", type=int, default=32, help="prompts generated together (default: 32)")
    output = generate.add_argument_group("output")
    output.add_argument("--stream", action="store_true", help="print each text while it is generated, one by one")
    output.add_argument("--json", action="store_true", help="print one JSON object a prompt, then one of figures")
    output.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print figures of speed and memory at the end",
    )

    check = new("check", "Say, layer by layer, what a paged cache will do with a checkpoint, and why.")
    _add_checkpoint(check)
    check.add_argument("--config-only", action="store_true", help="use random weights: only config.json is needed")

    build = new("build", "Build the native CPU kernel now, in the foreground.")
    return {"generate": (generate, _generate), "check": (check, _check), "build": (build, _build)}


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a checkpoint, or its name on the hub")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: a GPU if there is one)")


HELP = """usage: hf-paged COMMAND ...

PagedAttention for transformers models: the same texts from a fraction of the KV memory.

commands:
  generate CHECKPOINT [PROMPT ...]   generate text and show speed and memory
  check CHECKPOINT                   say what a paged cache will do with a model, and why
  build                              build the native CPU kernel now

'hf-paged COMMAND --help' lists the options of a command; --version prints the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 refused (check) or not built (build), 2 wrong usage or input, 130 interrupted,
    141 nobody reads the output.
    """
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except (UsageError, ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # Python flushes standard output once more on exit; let that go nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_BROKEN_PIPE
        print("hf-paged: error:", " ".join(str(error).split()), file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("\nhf-paged: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(argv: list[str]) -> int:
    if not argv:
        raise UsageError("no command given; 'hf-paged --help' lists them")
    if argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if argv[0] == "--version":
        print(f"hf-paged {hf_paged.__version__}")
        return 0
    commands = _parsers()
    if argv[0] not in commands:
        close = difflib.get_close_matches(argv[0], commands, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(commands)}"
        raise UsageError(f"unknown command {argv[0]!r}; {hint}")
    parser, command = commands[argv[0]]
    try:
        # Options may stand between the prompts.
        args = parser.parse_intermixed_args(argv[1:])
    except SystemExit as done:  # --help
        return int(done.code or 0)
    return command(args)


# -- loading -------------------------------------------------------------------------------------------------------


def _find_checkpoint(name: str) -> str:
    """The name as it is, if it is a checkpoint's folder or may be a name on the hub."""
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UsageError(f"{name} is no checkpoint: it holds no config.json; give a folder made by save_pretrained")
    elif folder.exists():
        raise UsageError(f"{name} is a file; give the folder of a checkpoint, made by save_pretrained")
    elif not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or ("/" in name and Path(name).parent.is_dir()):
        raise UsageError(f"there is no folder {name}; give the folder of a checkpoint, or its name on the hub")
    return name


def _from_pretrained(loader: Any, name: str, what: str, **kwargs: Any) -> Any:
    from safetensors import SafetensorError

    try:
        return loader.from_pretrained(name, **kwargs)
    except (OSError, ValueError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"cannot load the {what} of {name}: {reason}") from error


def _load_model(args: argparse.Namespace, *, random_weights: bool = False) -> Any:
    """The model in eval mode; raises UsageError where transformers knows no language model of that kind."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = _from_pretrained(AutoConfig, args.checkpoint, "configuration")
    loader: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    device = _device(args.device)
    if random_weights:
        dtype = config.dtype or torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
        model = loader.from_config(config, dtype=dtype)
    else:
        model = _from_pretrained(loader, args.checkpoint, "model", config=config, dtype=args.dtype)
    return model.to(device).eval()


def _device(name: str | None) -> Any:
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name} cannot be used here ({reason}); 'cpu' always can") from None
    return device


# -- generate ------------------------------------------------------------------------------------------------------


def _read_prompts(args: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(args.prompts)
    places = [f"prompt {number}" for number in range(1, len(prompts) + 1)]
    source = args.file
    if source is None and not prompts and not sys.stdin.isatty():
        source = "-"
    if source is not None:
        where = "standard input" if source == "-" else source
        try:
            text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"{where} is not UTF-8 text; convert it first") from None
        except OSError as error:
            raise UsageError(f"cannot read prompts from {where}: {error.strerror}") from None
        lines = text.split("\n")
        if lines[-1] == "":
            lines.pop()
        prompts += lines
        places += [f"line {number} of {where}" for number in range(1, len(lines) + 1)]
    if not prompts:
        raise UsageError("no prompt given; type one after the checkpoint, or use --file or standard input")
    for prompt, place in zip(prompts, places):
        if not prompt.strip():
            raise UsageError(f"{place} is empty ({prompt!r}); give it some text, or leave it out")
    return prompts


def _generation_options(args: argparse.Namespace, defaults: Any) -> dict[str, Any]:
    """The options that were given; raises UsageError for those that contradict each other.

    `defaults`: the checkpoint's GenerationConfig, which holds where nothing is given.
    """
    names = [*_GENERATION_OPTIONS, "do_sample", "early_stopping", "stop_strings"]
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}

    def spelt(name: str) -> str:
        return f"--{name.replace('_', '-')} {options[name]}"

    def effective(name: str, otherwise: Any) -> Any:
        value = options.get(name, getattr(defaults, name, None))
        return otherwise if value is None else value

    for name, (fits, words) in _RANGES.items():
        if name in options and not fits(options[name]):
            raise UsageError(f"{spelt(name)} is out of range; give {words}")
    if args.batch_size < 1:
        raise UsageError(f"--batch-size {args.batch_size}: at least 1 is needed")
    sampled, beams = bool(effective("do_sample", False)), int(effective("num_beams", 1))
    for name in _SAMPLING_ONLY:
        if name in options and not sampled:
            raise UsageError(f"{spelt(name)} does nothing in a search that does not sample; add --do-sample")
    for name in ("length_penalty", "early_stopping"):
        if name in options and beams == 1:
            raise UsageError(f"{spelt(name)} does nothing without beams; add --num-beams 4")
    sequences = int(effective("num_return_sequences", 1))
    if sequences > 1 and not sampled and sequences > beams:
        raise UsageError(
            f"--num-return-sequences {sequences} needs that many different texts; add --do-sample, "
            f"or --num-beams {sequences} or more"
        )
    if beams > 1 and sequences > beams:
        raise UsageError(f"--num-return-sequences {sequences} is more than --num-beams {beams}; raise the beams")
    if options.get("min_new_tokens", 0) > effective("max_new_tokens", DEFAULT_NEW_TOKENS):
        raise UsageError(f"{spelt('min_new_tokens')} is more than --max-new-tokens; raise the latter")
    if args.stream and beams > 1:
        raise UsageError(f"--stream cannot show beam search (--num-beams {beams}); drop one of them")
    if args.stream and sequences > 1:
        raise UsageError(f"--stream shows one text a prompt, not {sequences}; drop --num-return-sequences")
    if args.stream and args.json:
        raise UsageError("--stream and --json contradict each other; drop one of them")
    return options


@dataclass(slots=True)
class _Loaded:
    """A checkpoint, ready to generate."""

    model: Any
    tokenizer: Any
    prompts: list[str]
    ids: list[list[int]]
    options: dict[str, Any]
    pad_token_id: int


def _load(args: argparse.Namespace) -> _Loaded:
    prompts = _read_prompts(args)
    _find_checkpoint(args.checkpoint)
    hf_paged.CacheConfig(**_cache_options(args))
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from hf_paged.model.support import refuse_unsupported

    # The small files first: most mistakes show before the weights are read.
    _from_pretrained(AutoConfig, args.checkpoint, "configuration")
    with contextlib.suppress(OSError):
        # A checkpoint without this file has no defaults of its own.
        _generation_options(args, GenerationConfig.from_pretrained(args.checkpoint))
    tokenizer = _from_pretrained(AutoTokenizer, args.checkpoint, "tokenizer")
    chat = bool(tokenizer.chat_template) if args.chat is None else args.chat
    if chat and not tokenizer.chat_template:
        raise UsageError(f"--chat: the tokenizer of {args.checkpoint} has no chat template; drop --chat")
    _show("loading the model ...")
    model = _load_model(args)
    refuse_unsupported(model)
    options = _generation_options(args, model.generation_config)
    ids = [_encode(tokenizer, prompt, chat=chat) for prompt in prompts]
    _check_lengths(model, ids, options)
    candidates = (model.generation_config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad_token_id = next(token for token in candidates if token is not None)
    return _Loaded(model, tokenizer, prompts, ids, options, pad_token_id)


def _cache_options(args: argparse.Namespace) -> dict[str, int]:
    options = {"block_size": args.block_size, "num_blocks": args.num_blocks}
    return {name: value for name, value in options.items() if value is not None}


def _encode(tokenizer: Any, prompt: str, *, chat: bool) -> list[int]:
    # verbose=False: a prompt that is too long gets our error, not the tokenizer's warning.
    if chat:
        message = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return list(tokenizer(prompt, verbose=False)["input_ids"])


def _check_lengths(model: Any, ids: list[list[int]], options: dict[str, Any]) -> None:
    """Refuse prompts that the model cannot take; set `max_new_tokens`, where it is not given, to what has room."""
    import torch

    from hf_paged.generation.validation import check_prompts

    for number, prompt in enumerate(ids, 1):
        check_prompts(model, torch.tensor([prompt], dtype=torch.long), f"prompt {number}")
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max(map(len, ids))
    given = options.get("max_new_tokens")
    if given is None:
        defaults = model.generation_config
        if defaults.max_new_tokens is None and defaults.max_length is None:
            room = DEFAULT_NEW_TOKENS if limit is None else max(1, limit - longest)
            options["max_new_tokens"] = min(DEFAULT_NEW_TOKENS, room)
    elif limit is not None:
        try:
            # The last token generated is never read.
            check_prompts(model, torch.zeros(1, longest + given - 1, dtype=torch.long), "text")
        except ValueError:
            raise UsageError(
                f"--max-new-tokens {given} after a prompt of {longest} tokens passes the model's limit of {limit}; "
                f"use {limit - longest} or less, or a shorter prompt"
            ) from None


@dataclass(slots=True)
class _Answer:
    """One generated text."""

    text: str
    num_tokens: int
    finish_reason: str


def _generate(args: argparse.Namespace) -> int:
    import torch

    loaded = _load(args)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    size = 1 if args.stream else args.batch_size
    generated, seconds = 0, 0.0
    with hf_paged.record_calls() as records:
        for start in range(0, len(loaded.ids), size):
            batch = loaded.ids[start : start + size]
            if args.stream:
                _print_header(loaded, start)
            began = time.perf_counter()
            answers = _generate_batch(args, loaded, batch)
            seconds += time.perf_counter() - began
            generated += sum(answer.num_tokens for row in answers for answer in row)
            for index, row in enumerate(answers, start):
                if not args.stream:
                    _print_answers(args, loaded, index, row)
    if args.stats:
        figures = _figures(records, generated, sum(map(len, loaded.ids)), seconds)
        print(json.dumps({"stats": figures}) if args.json else _render(figures))
    return 0


def _generate_batch(args: argparse.Namespace, loaded: _Loaded, batch: list[list[int]]) -> list[list[_Answer]]:
    """The answers of every prompt of a batch (token ids), `num_return_sequences` each."""
    import torch
    from transformers import TextStreamer

    model, tokenizer = loaded.model, loaded.tokenizer
    width = max(map(len, batch))
    rows = torch.tensor([[loaded.pad_token_id] * (width - len(ids)) + ids for ids in batch], device=model.device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in batch], device=model.device)
    kwargs: dict[str, Any] = {**loaded.options, "pad_token_id": loaded.pad_token_id}
    if cache_options := _cache_options(args):
        kwargs["cache_config"] = cache_options
    if "stop_strings" in kwargs:
        kwargs["tokenizer"] = tokenizer
    if args.stream:
        kwargs["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        with _progress(model, enabled=not args.stream):
            output = model.generate(rows, attention_mask=mask, cache_implementation="paged", **kwargs)
    except hf_paged.OutOfBlocks as error:
        raise UsageError(
            f"--num-blocks {args.num_blocks} is too few for {len(batch)} prompts at once ({error.needed} more needed "
            f"at {error.available} free); give more, or a smaller --batch-size"
        ) from error
    answers = [_answer(loaded, tokens) for tokens in output[:, width:].tolist()]
    each = len(answers) // len(batch)
    return [answers[i : i + each] for i in range(0, len(answers), each)]


def _answer(loaded: _Loaded, tokens: list[int]) -> _Answer:
    """Text and length of a row of new tokens, without the padding after its end."""
    eos = loaded.model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    length, reason = len(tokens), "length"
    for position, token in enumerate(tokens):
        if token in ends:
            length, reason = position + 1, "eos"
            break
    else:
        while length and tokens[length - 1] == loaded.pad_token_id:
            length, reason = length - 1, "stop"
    text = loaded.tokenizer.decode(tokens[:length], skip_special_tokens=True)
    if reason == "length" and any(text.endswith(stop) for stop in loaded.options.get("stop_strings", ())):
        reason = "stop"
    return _Answer(text, length, reason)


# -- output --------------------------------------------------------------------------------------------------------


def _print_header(loaded: _Loaded, index: int) -> None:
    print(f"[{index + 1}/{len(loaded.prompts)}] {loaded.prompts[index]}", flush=True)


def _print_answers(args: argparse.Namespace, loaded: _Loaded, index: int, answers: list[_Answer]) -> None:
    if args.json:
        outputs = [
            {"text": answer.text, "num_tokens": answer.num_tokens, "finish_reason": answer.finish_reason}
            for answer in answers
        ]
        print(json.dumps({"prompt": loaded.prompts[index], "outputs": outputs}, ensure_ascii=False), flush=True)
        return
    _print_header(loaded, index)
    for number, answer in enumerate(answers, 1):
        print(f"({number}) {answer.text}" if len(answers) > 1 else answer.text)
    print(flush=True)


def _show(message: str) -> None:
    """A line of progress that the next one overwrites; only on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress(model: Any, *, enabled: bool) -> Iterator[None]:
    """Count the model's forwards on a terminal: a hook of the model sees them in every decoding mode."""
    _show("")
    if not (enabled and sys.stderr.isatty()):
        yield
        return
    steps, shown = 0, 0.0

    def count(*_: Any) -> None:
        nonlocal steps, shown
        steps += 1
        if time.perf_counter() - shown > 0.1:
            shown = time.perf_counter()
            _show(f"generating: step {steps}")

    hook = model.register_forward_hook(count)
    try:
        yield
    finally:
        hook.remove()
        _show("")


def _figures(records: list[CallRecord], generated: int, prompt_tokens: int, seconds: float) -> dict[str, Any]:
    """Speed over all calls; memory of the call that used most."""
    largest = max(records, key=lambda record: record.kv_bytes_used)
    reasons = sorted({record.reason for record in records if record.reason is not None})
    return {
        "prompt_tokens": prompt_tokens,
        "generated_tokens": generated,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(generated / seconds, 2) if seconds else 0.0,
        "route": largest.route,
        "reasons": reasons,
        "block_size": largest.block_size,
        "peak_blocks_used": largest.peak_blocks_used,
        "peak_blocks_shared": largest.peak_blocks_shared,
        "cow_copies": sum(record.cow_copies for record in records),
        "kv_bytes_reserved": largest.kv_bytes_reserved,
        "kv_bytes_used": largest.kv_bytes_used,
        "kv_bytes_filled": largest.kv_bytes_filled,
        "kv_bytes_contiguous": largest.kv_bytes_contiguous,
    }


def _render(figures: dict[str, Any]) -> str:
    used, filled = figures["kv_bytes_used"], figures["kv_bytes_filled"]
    contiguous = figures["kv_bytes_contiguous"]
    route = "packed rows" if figures["route"] == "packed" else "transformers' loop: " + "; ".join(figures["reasons"])
    rows = {
        "generated": f"{figures['generated_tokens']} tokens in {figures['seconds']:.2f} s "
        f"({figures['tokens_per_second']:.0f} tokens/s) after {figures['prompt_tokens']} tokens of prompts",
        "route": route,
        "blocks": f"{figures['peak_blocks_used']} used at the peak ({figures['block_size']} tokens each), "
        f"{figures['peak_blocks_shared']} shared; {figures['cow_copies']} copied on write",
        "KV memory": f"{_bytes(figures['kv_bytes_reserved'])} reserved, {_bytes(used)} used, {_bytes(filled)} filled"
        + (f" ({filled / used:.0%} of used)" if used else ""),
        "contiguous": f"{_bytes(contiguous)} for the same rows"
        + (f" ({contiguous / used:.1f} x used)" if used else ""),
    }
    return "\n".join(["-" * 40, *(f"{name:<11} {text}" for name, text in rows.items())])


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


# -- check, build --------------------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    _find_checkpoint(args.checkpoint)
    _show("loading the model ...")
    report = hf_paged.check(_load_model(args, random_weights=args.config_only))
    _show("")
    print(report)
    return 0 if report.supported else EXIT_REFUSED


def _build(args: argparse.Namespace) -> int:
    from hf_paged.kernels.native import build

    try:
        build.build()
    except build.NativeBuildError as error:
        print("hf-paged:", " ".join(str(error).split()), file=sys.stderr)
        return EXIT_REFUSED
    print(build.status())
    return 0


if __name__ == "__main__":
    sys.exit(main())
