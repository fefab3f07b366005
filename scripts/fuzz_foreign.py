"""Compare paged calls with plain `generate` while third-party code runs in the model: random families, options, doors,
and such code (hooks, replaced functions, modes, autocast, threads that copy, pickle, train, call, and forks).

    python scripts/fuzz_foreign.py --cases 10000 --log benchmarks/results/fuzz-foreign.json
    python scripts/fuzz_foreign.py --first 1234 --cases 1        # one case again

A case is its number. It is "equal"; "refused", if hf_paged raises an error of its own where plain `generate` works;
"near tie", if plain `generate` itself has other tokens in float64; "rounded", if tokens differ under autocast, where
roundings decide; "different", which is a silent wrong result; or "crash", any other error. `--share 1/2` takes every
second case.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import json
import os
import pickle
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_paged
from hf_paged.integration.names import CACHE, ENCODES_MEDIA
from tests import encoder_models
from tests.architectures import media
from tests.architectures.tiny import tiny_model
from tests.generation.solo import OPTIONS, config

CAUSAL = (
    "apertus", "arcee", "bamba", "biogpt", "bloom", "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3",
    "ernie4_5", "exaone4", "falcon", "falcon_h1", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe",
    "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "helium", "jamba",
    "lfm2", "llama", "llama4_text", "mamba", "mamba2", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmoe",
    "opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_next", "seed_oss", "smollm3",
    "stablelm", "starcoder2",
)  # fmt: skip
ENCODER_DECODER = ("t5", "bart", "whisper", "marian", "pegasus", "speech2text", "moonshine")
MEDIA = (
    "llava-image", "qwen2_vl-video", "qwen3_vl-video", "smolvlm-image", "lfm2_vl-image",
    "voxtral-audio", "qwen3_5-image",
)  # fmt: skip
DOORS = ("generate", "cache", "engine")
REFUSALS = (hf_paged.UnsupportedModelError, ValueError, NotImplementedError)
Foreign = Callable[[Any, random.Random], contextlib.AbstractContextManager[Any]]


# -- third-party code ------------------------------------------------------------------------------------------------


def layers_of(model: Any) -> list[nn.Module]:
    """The modules with parameters, but for the model itself, lists and embeddings."""
    found = [each for each in model.modules() if each is not model and any(True for _ in each.parameters())]
    return [each for each in found if not isinstance(each, nn.ModuleList | nn.Embedding)]


def changed(result: Any, factor: float = 0.7) -> Any:
    """What a module returns, with its first tensor multiplied."""
    if isinstance(result, torch.Tensor):
        return result * factor if result.is_floating_point() else result
    if isinstance(result, tuple) and result and isinstance(result[0], torch.Tensor):
        return (result[0] * factor, *result[1:])
    return result


def changing(own: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """A function, or a method of a class, with another result."""
    return lambda *args, **kwargs: changed(own(*args, **kwargs), factor)


def nothing(model: Any, rng: random.Random) -> Any:
    return contextlib.nullcontext()


def hook(model: Any, rng: random.Random) -> Any:
    return rng.choice(layers_of(model)).register_forward_hook(lambda module, args, result: changed(result))


def observing_hook(model: Any, rng: random.Random) -> Any:
    seen: list[Any] = []
    return rng.choice(layers_of(model)).register_forward_hook(lambda module, args, result: seen.append(args))


def batch_hook(model: Any, rng: random.Random) -> Any:
    return rng.choice(layers_of(model)).register_forward_hook(lambda module, args, result: mixed(result))


def mixed(result: Any) -> Any:
    """Depends on the layout of the batch."""
    if isinstance(result, torch.Tensor) and result.dim() == 3 and result.is_floating_point():
        return result + 0.1 * result[:, -1:]
    return result


def batch_function(model: Any, rng: random.Random) -> Any:
    home, name = rng.choice([(nn.functional, "embedding"), (torch.Tensor, "to"), (nn.functional, "linear")])
    own = getattr(home, name)
    return mock.patch.object(home, name, lambda *args, **kwargs: mixed(own(*args, **kwargs)))


def instance_forward(model: Any, rng: random.Random) -> Any:
    module: Any = rng.choice(layers_of(model))
    return mock.patch.object(module, "forward", changing(module.forward, 0.7))


@contextlib.contextmanager
def subclass(model: Any, rng: random.Random) -> Iterator[None]:
    """An instance's class with another `forward` or `__call__`."""
    module: Any = rng.choice(layers_of(model))
    kind, name = type(module), rng.choice(["forward", "__call__"])
    module.__class__ = type(kind.__name__, (kind,), {name: changing(getattr(kind, name), 0.7)})
    try:
        yield
    finally:
        module.__class__ = kind


def class_forward(model: Any, rng: random.Random) -> Any:
    kind: Any = type(rng.choice(layers_of(model)))
    return mock.patch.object(kind, "forward", changing(kind.forward, 0.9))


def function(model: Any, rng: random.Random) -> Any:
    """A replaced function of torch."""
    home, name = rng.choice(
        [(nn.functional, each) for each in ("linear", "silu", "gelu", "relu", "layer_norm", "softmax")]
        + [(nn.functional, "scaled_dot_product_attention"), (torch, "matmul"), (torch, "rsqrt"), (torch, "cat")]
        + [(nn.functional, "embedding"), (torch.Tensor, "cos"), (torch.Tensor, "transpose")]
    )
    return mock.patch.object(home, name, changing(getattr(home, name), 0.9))


def module_call(model: Any, rng: random.Random) -> Any:
    own: Any = nn.Module.__call__
    kind = type(rng.choice(layers_of(model)))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(self, *args, **kwargs)
        return changed(result, 0.9) if type(self) is kind else result

    return mock.patch.object(nn.Module, "__call__", call)


class _Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.9 if func is nn.functional.linear else result


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.9 if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) else result


def mode(model: Any, rng: random.Random) -> Any:
    return rng.choice([_Function, _Dispatch])()


def autocast(model: Any, rng: random.Random) -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def attribute(model: Any, rng: random.Random) -> Any:
    """A number or an activation of a module is another one."""
    found = [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if name in ("eps", "variance_epsilon", "scaling", "act_fn", "activation_fn", "limit", "alpha", "normalizer")
        and (isinstance(value, float) or callable(value))
    ]
    if not found:
        return contextlib.nullcontext()
    module, name = rng.choice(found)
    own = getattr(module, name)
    return mock.patch.object(module, name, own * 3 + 0.1 if isinstance(own, float) else torch.tanh)


@contextlib.contextmanager
def weight(model: Any, rng: random.Random) -> Iterator[None]:
    """A weight is changed in place, by `.data`, or replaced."""
    module: Any = rng.choice(
        [each for each in layers_of(model) if isinstance(vars(each)["_parameters"].get("weight"), nn.Parameter)]
    )
    own, way = module.weight, rng.choice(["in place", "data", "parameter"])
    kept = own.detach().clone()
    with torch.no_grad():
        if way == "in place":
            own.mul_(1.3)
        elif way == "data":
            own.data = own.data * 1.3
        else:
            module.weight = nn.Parameter(own * 1.3)
    try:
        yield
    finally:
        module.weight = own
        own.data = kept


def prepared(model: Any, rng: random.Random) -> Any:
    """`prepare_inputs_for_generation` of the instance, or of its class."""
    owner: Any = rng.choice([model, type(model)])
    own = owner.prepare_inputs_for_generation

    def prepare(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        if found.get("input_ids") is not None:
            found["input_ids"] = found["input_ids"].clamp(max=60)
        return found

    return mock.patch.object(owner, own.__name__, prepare)


def choosing(model: Any, rng: random.Random) -> Any:
    """A processor's `__call__` or `torch.multinomial` is another one."""
    home: Any
    home, name = rng.choice(
        [
            (torch, "multinomial"),
            (transformers.TemperatureLogitsWarper, "__call__"),
            (transformers.RepetitionPenaltyLogitsProcessor, "__call__"),
        ]
    )
    own = getattr(home, name)

    def other(*args: Any, **kwargs: Any) -> Any:
        if name == "multinomial":
            return args[0].argsort(-1, descending=True)[:, : kwargs.get("num_samples", args[1] if len(args) > 1 else 1)]
        return own(*args, **kwargs).flip(-1)

    return mock.patch.object(home, name, other)


class Beside:
    """Work in another thread, again and again, while the block runs; its faults are raised at the end."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._ended, self._error = work, threading.Event(), None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            for _ in range(50):
                self._work()
                if self._ended.is_set():
                    return
        except BaseException as error:  # raised in the main thread
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._error is not None and error[0] is None:
            raise Beside.Fault(f"in another thread: {type(self._error).__name__}: {self._error}"[:300])

    class Fault(Exception):
        """What another thread saw."""


def _logits(model: Any) -> torch.Tensor:
    ids = torch.tensor([[5, 9, 11, 13, 17]])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def beside(model: Any, rng: random.Random) -> contextlib.AbstractContextManager[Any]:
    """Another thread copies, pickles, calls or trains on the model, and sees the model alone."""
    if model.config.is_encoder_decoder:
        return contextlib.nullcontext()
    expected, way = _logits(model), rng.choice(["copy", "pickle", "call", "config"])
    if way == "pickle":
        try:
            pickle.dumps(model)
        except AttributeError:  # once transformers has put its own hooks into a model, for hidden states
            way = "copy"

    def work() -> None:
        if way == "call":
            found = _logits(model)
        elif way == "config":
            if "hf_paged" in repr(vars(copy.deepcopy(model.config))):
                raise AssertionError("a copied config names hf_paged")
            return
        else:
            other = copy.deepcopy(model) if way == "copy" else pickle.loads(pickle.dumps(model))
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.mul_(0.5)
            copied = _logits(other)
            if torch.equal(copied, expected):
                raise AssertionError(f"a {way} computes with the original's weights")
            return
        if not torch.allclose(found, expected, atol=1e-4, rtol=1e-3):
            raise AssertionError(f"a call differs by {float((found - expected).abs().max())}")

    return Beside(work)


@contextlib.contextmanager
def fork(model: Any, rng: random.Random) -> Iterator[None]:
    """A child that begins in the middle computes what plain calls compute."""
    if model.config.is_encoder_decoder:
        yield
        return
    expected, statuses = _logits(model), []

    def child(module: Any, args: Any) -> None:
        if not statuses:
            statuses.append(None)
            pid = os.fork()
            if pid == 0:
                handle.remove()
                status = 1
                with contextlib.suppress(BaseException):
                    status = int(not torch.allclose(_logits(model), expected, atol=1e-4, rtol=1e-3))
                os._exit(status)
            statuses[0] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    handle = layers_of(model)[-1].register_forward_pre_hook(hf_paged.tokenwise(child))
    try:
        yield
    finally:
        handle.remove()
    if statuses and statuses[0] != 0:
        raise Beside.Fault(f"a forked child ended with {statuses[0]}")


@contextlib.contextmanager
def adapter(model: Any, rng: random.Random) -> Iterator[None]:
    """A LoRA that is active while the block runs."""
    import peft

    if isinstance(model, peft.PeftModel) or model.config.is_encoder_decoder:
        yield
        return
    linears = sorted(
        {name.split(".")[-1] for name, each in model.named_modules() if type(each) is nn.Linear} - {"lm_head"}
    )
    if not linears:
        yield
        return
    options = peft.LoraConfig(target_modules=linears[:2], r=2, init_lora_weights=False)
    tuned = peft.inject_adapter_in_model(options, model, "fuzz")
    tuned.eval()
    try:
        yield
    finally:
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                if hasattr(child, "base_layer") and hasattr(child, "lora_A"):
                    parent._modules[name] = child.base_layer
        vars(model).pop("peft_config", None)


FOREIGN: dict[str, Foreign] = {
    each.__name__: each
    for each in (
        nothing, hook, observing_hook, batch_hook, instance_forward, subclass, class_forward, function, batch_function,
        module_call, mode, autocast, attribute, weight, prepared, choosing, beside, fork, adapter,
    )
}  # fmt: skip


# -- cases -----------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    number: int
    family: str
    door: str
    options: str
    foreign: str
    before: bool
    outcome: str = ""
    note: str = ""
    seconds: float = 0.0


def draw(number: int) -> tuple[Case, random.Random]:
    rng = random.Random(number)
    kind = rng.choices(["causal", "encoder-decoder", "media"], [86, 8, 6])[0]
    if kind == "causal":
        family = rng.choice([each for each in CAUSAL if each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
    else:
        family = rng.choice(ENCODER_DECODER if kind == "encoder-decoder" else MEDIA)
    door = rng.choice(DOORS if kind == "causal" else ("generate", "engine"))
    if kind == "media" and not ENCODES_MEDIA:
        door = "generate"
    return Case(number, family, door, rng.choice(list(OPTIONS)), rng.choice(list(FOREIGN)), rng.random() < 0.5), rng


@functools.lru_cache(maxsize=80)
def model_of(family: str) -> Any:
    if family in ENCODER_DECODER:
        return encoder_models.model(family)
    return media.build(media.CASES[family]) if family in MEDIA else tiny_model(family)


def inputs_of(case: Case, model: Any, rng: random.Random) -> list[dict[str, Any]]:
    """The inputs of each request: without padding, one row each."""
    if case.family in MEDIA:
        found = []
        # Not the second, of two media: beams of plain `generate` mix them up where a class has one tensor of all.
        for row in media.rows(model, media.CASES[case.family])[::2]:
            ids = torch.tensor([row.ids])
            found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), **row.inputs})
        return found
    if case.family in ENCODER_DECODER:
        every = encoder_models.inputs(case.family, 2)
        return [{name: value[row : row + 1] for name, value in every.items()} for row in range(2)]
    found = []
    for length in (rng.randrange(1, 40), rng.randrange(1, 24)):
        ids = torch.tensor([[rng.randrange(3, 90) for _ in range(length)]])
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return found


def options_of(case: Case) -> Any:
    made = config(case.options, max_new_tokens=8)
    if made.do_sample:
        made.seed = case.number
    return made


def by_call(case: Case, model: Any, inputs: list[dict[str, Any]], door: str | None) -> list[Any]:
    found = []
    for given in inputs:
        more: dict[str, Any] = {}
        if door == "generate":
            more["cache_implementation"] = "paged"
        elif door == "cache":
            more[CACHE] = hf_paged.PagedKVCache(model.config)
        torch.manual_seed(case.number)
        with contextlib.redirect_stderr(io.StringIO()):
            # Not Whisper's own, which samples by its temperatures only.
            output = transformers.GenerationMixin.generate(model, **given, generation_config=options_of(case), **more)
        start = given["input_ids"].shape[1] if not model.config.is_encoder_decoder else 1
        found.append([_until_end(row, start, ends_of(case, model)) for row in output.tolist()])
    return found


def _until_end(row: list[int], start: int, ends: Any) -> list[int]:
    tokens, ends = row[start:], ends if isinstance(ends, list) else [ends]
    end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:end]


def ends_of(case: Case, model: Any) -> Any:
    asked = options_of(case).eos_token_id
    return model.generation_config.eos_token_id if asked is None else asked


def by_engine(case: Case, model: Any, inputs: list[dict[str, Any]]) -> list[Any]:
    with hf_paged.Engine(model, {"num_blocks": 128}) as engine:
        for number, given in enumerate(inputs):
            rest = dict(given)
            ids = rest.pop("input_ids", None)
            if not model.config.is_encoder_decoder or not rest:
                rest.pop("attention_mask", None)
            engine.add_request(
                [] if ids is None else ids[0].tolist(), options_of(case), inputs=rest or None, request_id=str(number)
            )
        done: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            done |= {each.request_id: each for each in engine.step() if each.finished}
        engine.check_integrity()
    found = []
    for number, _ in enumerate(inputs):
        output = done[str(number)]
        if output.exception is not None:
            raise output.exception
        found.append([_until_end(each.token_ids, 0, ends_of(case, model)) for each in output.outputs])
    return found


def paged(case: Case, model: Any, inputs: list[dict[str, Any]]) -> list[Any]:
    return by_engine(case, model, inputs) if case.door == "engine" else by_call(case, model, inputs, case.door)


def judge(case: Case, rng: random.Random) -> None:
    model = model_of(case.family)
    inputs = inputs_of(case, model, rng)
    if case.before:  # verdicts and copies of the model without the code
        with contextlib.suppress(*REFUSALS):
            paged(case, model, inputs)
    state = rng.getstate()
    try:
        with FOREIGN[case.foreign](model, rng):
            try:
                wanted = by_call(case, model, inputs, None)
            except Exception as error:  # then there is nothing to compare with
                case.outcome, case.note = "plain fails", f"{type(error).__name__}: {error}"[:200]
                return
            found = paged(case, model, inputs)
        after = by_call(case, model, inputs, None), paged(case, model, inputs)
    except Beside.Fault as fault:
        case.outcome, case.note = "different", str(fault)
        return
    except REFUSALS as error:
        case.outcome, case.note = "refused", f"{type(error).__name__}: {error}"[:300]
        return
    case.outcome = "equal"
    for step, (one, two) in (("with the code", (wanted, found)), ("after it", after)):
        if one != two:
            rng.setstate(state)
            case.outcome, case.note = _why_not_equal(case, model, inputs, rng, step, one, two)
            return


def _why_not_equal(
    case: Case, model: Any, inputs: Any, rng: random.Random, step: str, one: list[Any], two: list[Any]
) -> tuple[str, str]:
    note = f"{step}: {one} != {two}"[:400]
    if case.foreign == "autocast" and step == "with the code":
        return "rounded", note
    try:
        in_double = copy.deepcopy(model).double()
        for module in in_double.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "eager"  # others take no float64
        given = [
            {name: value.double() if value.is_floating_point() else value for name, value in each.items()}
            for each in inputs
        ]
        context = FOREIGN[case.foreign] if step == "with the code" else nothing
        with context(in_double, rng):
            exact = by_call(case, in_double, given, None)
        # Where plain `generate` itself depends on roundings, ours may differ from it.
        if exact != one:
            return "near tie", note
    except Exception as error:  # some models take no float64
        note += f" (float64: {type(error).__name__}: {error}"[:150] + ")"
    return "different", note


def run(case: Case, rng: random.Random) -> None:
    start = time.time()
    try:
        judge(case, rng)
    except Exception as error:  # what no case should raise
        case.outcome = "crash"
        case.note = f"{type(error).__name__}: {error}"[:300] + " at " + traceback.format_exc().splitlines()[-4].strip()
        model_of.cache_clear()
    if case.outcome != "equal":
        model_of.cache_clear() if case.outcome == "different" else None
    case.seconds = round(time.time() - start, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    parser.add_argument("--share", default="1/1")
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    part, parts = map(int, args.share.split("/"))
    counts: Counter[str] = Counter()
    by_code: dict[str, Counter[str]] = {name: Counter() for name in FOREIGN}
    others: list[dict[str, Any]] = []
    began = time.time()
    for number in range(args.first + part - 1, args.first + args.cases, parts):
        if time.time() - began > args.seconds:
            break
        case, rng = draw(number)
        run(case, rng)
        counts[case.outcome] += 1
        by_code[case.foreign][case.outcome] += 1
        if case.outcome in ("different", "crash", "near tie", "rounded"):
            others.append(asdict(case))
            print(json.dumps(asdict(case)), flush=True)
        if args.log and (sum(counts.values()) % 50 == 0 or args.cases < 50):
            _write(args.log, args, counts, by_code, others, began)
    if args.log:
        _write(args.log, args, counts, by_code, others, began)
    print(dict(counts), f"{time.time() - began:.0f} s")
    return int(counts["different"] + counts["crash"] > 0)


def _write(log: Path, args: Any, counts: Any, by_code: Any, others: Any, began: float) -> None:
    record = {
        "transformers": transformers.__version__, "torch": torch.__version__, "first": args.first, "share": args.share,
        "cases": sum(counts.values()), "seconds": round(time.time() - began), "outcomes": counts, "by code": by_code,
        "others": others,
    }  # fmt: skip
    log.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
