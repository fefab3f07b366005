"""Libraries that call `generate` for the user: pipelines, PEFT, evaluation harnesses, trainers. Paged against plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import StoppingCriteria, StoppingCriteriaList, pipeline

import hf_paged
from tests import conftest, models

TEXTS = ["Once upon a time", "Hi", "The quick brown fox jumps over the lazy dog"]
PAGED: dict[str, Any] = {"cache_implementation": "paged"}
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} | {% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)


def _pipe(family: str = "llama") -> Any:
    tokenizer = models.tokenizer()
    tokenizer.chat_template = CHAT
    return pipeline("text-generation", model=models.build(family), tokenizer=tokenizer)


class _Texts(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> str:
        return TEXTS[index]


def _same_text(pipe: Any, make_input: Any, *, calls: int, **options: Any) -> Any:
    options = {"max_new_tokens": 8, "do_sample": False, **options}
    torch.manual_seed(5)
    plain = pipe(make_input(), **options)
    plain = plain if isinstance(plain, (list, dict)) else list(plain)
    torch.manual_seed(5)
    with hf_paged.record_calls() as records:
        paged = pipe(make_input(), **options, **PAGED)
        paged = paged if isinstance(paged, (list, dict)) else list(paged)
    assert paged == plain
    assert len(records) == calls
    assert conftest.blocks_in_use() == 0
    return paged


_TURN = [{"role": "user", "content": "What is a block?"}]
GIVEN: dict[str, tuple[Any, int, dict[str, Any]]] = {  # what makes the input, the paged calls, options
    "a string": (lambda: TEXTS[0], 1, {}),
    "an empty string": (lambda: "", 1, {}),
    "a list": (lambda: list(TEXTS), 3, {}),
    "batches": (lambda: list(TEXTS), 2, {"batch_size": 2}),
    "a generator": (lambda: (text for text in TEXTS), 3, {}),
    "a generator of a batch": (lambda: (text for text in TEXTS), 1, {"batch_size": 3}),
    "a dataset": (_Texts, 2, {"batch_size": 2}),
    "messages": (lambda: _TURN, 1, {}),
    "chats": (lambda: [_TURN, [*_TURN, {"role": "A", "content": "no"}, *_TURN]], 1, {"batch_size": 2}),
    "samples": (
        lambda: list(TEXTS),
        1,
        {"batch_size": 3, "num_return_sequences": 3, "do_sample": True, "temperature": 3.0},
    ),
    "beams": (lambda: list(TEXTS), 1, {"batch_size": 3, "num_beams": 3, "num_return_sequences": 2}),
    "new text": (lambda: list(TEXTS), 1, {"batch_size": 3, "return_full_text": False}),
    "tensors": (lambda: list(TEXTS), 1, {"batch_size": 3, "return_tensors": True}),
    "a stop": (lambda: list(TEXTS), 1, {"batch_size": 3, "stop_sequence": "e"}),
    "max_length": (lambda: list(TEXTS), 1, {"batch_size": 3, "max_length": 60, "max_new_tokens": None}),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", models.FEW)
@pytest.mark.parametrize("given", GIVEN)
def test_pipeline(family: str, given: str) -> None:
    make_input, calls, options = GIVEN[given]
    result = _same_text(_pipe(family), make_input, calls=calls, **options)
    assert given != "a string" or len(result[0]["generated_text"]) > len(TEXTS[0])


def test_pipeline_with_the_argument_given_once() -> None:
    model, tokenizer = models.build("llama"), models.tokenizer()
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = pipeline("text-generation", model=model, tokenizer=tokenizer)(TEXTS, **options)
    with hf_paged.record_calls() as records:
        assert pipeline("text-generation", model=model, tokenizer=tokenizer, **PAGED)(TEXTS, **options) == expected
        assert len(records) == 3
        model.generation_config.cache_implementation = "paged"
        assert pipeline("text-generation", model=model, tokenizer=tokenizer)(TEXTS, **options) == expected
        assert len(records) == 6


# PEFT and TRL still use these older names of transformers.
older_names = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def _lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return wrapped.eval()


@pytest.mark.covering(1)
@older_names
@pytest.mark.parametrize("family", models.FEW)
@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 3, "do_sample": False}])
def test_peft_lora(family: str, options: dict[str, Any]) -> None:
    inputs = {**models.batch(5, 19, 8), "max_new_tokens": 8, "pad_token_id": 0, **options}
    base = models.shared(family).generate(**inputs)
    wrapped = _lora(models.build(family))
    plain = wrapped.generate(**inputs)
    with hf_paged.record_calls() as records:
        paged = wrapped.generate(**inputs, **PAGED)
    assert torch.equal(paged, plain)
    assert records[0].route == "packed"
    assert paged.tolist() != base.tolist(), "the adapter must matter"
    with wrapped.disable_adapter():
        assert torch.equal(wrapped.generate(**inputs, **PAGED), base)
    assert torch.equal(wrapped.generate(**inputs, **PAGED), plain)
    merged = wrapped.merge_and_unload()
    assert torch.equal(merged.generate(**inputs, **PAGED), plain)
    assert conftest.blocks_in_use() == 0


class _StopOnText(StoppingCriteria):
    """Like lm-eval's MultiTokenEOSCriteria: decodes the last tokens of each row and remembers which rows are done."""

    def __init__(self, text: str, tokenizer: Any, length: int, rows: int) -> None:
        self.text, self.tokenizer, self.length = text, tokenizer, length
        self.done = [False] * rows

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> bool:
        tail = self.tokenizer.batch_decode(input_ids[:, self.length :][:, -4:])
        for i, done in enumerate(self.done):
            self.done[i] = done or self.text in tail[i]
        return False not in self.done  # type: ignore[return-value]


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", models.FEW)
@pytest.mark.parametrize("gen_kwargs", [{"do_sample": False}, {"do_sample": True, "temperature": 1.5}])
def test_evaluation_harness_pattern(family: str, gen_kwargs: dict[str, Any]) -> None:
    """lm-eval's HFLM: left-padded batches, max_length, a criterion that returns a bool, use_cache=True, gen_kwargs."""
    model, tokenizer = models.shared(family), models.tokenizer()
    answers = []
    for given in ({}, PAGED):
        encoded = tokenizer(TEXTS, return_tensors="pt", padding="longest")
        context = encoded["input_ids"].shape[1]
        criteria = StoppingCriteriaList([_StopOnText("q", tokenizer, context, len(TEXTS))])
        torch.manual_seed(6)
        with torch.inference_mode():
            tokens = model.generate(
                input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"], max_length=context + 16,
                stopping_criteria=criteria, pad_token_id=tokenizer.pad_token_id, use_cache=True, **gen_kwargs, **given,
            )  # fmt: skip
        answers.append([tokenizer.decode(row) for row in tokens[:, context:]])
    assert answers[0] == answers[1]


@older_names
@pytest.mark.parametrize("kind", ["prompt", "ptuning", "prefix"])
def test_peft_prompt_learning(kind: str) -> None:
    """PEFT inserts virtual tokens through a patch on the model's input preparation; they must not be lost."""
    peft = pytest.importorskip("peft")
    configs = {
        "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
        "ptuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16),
        "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    }
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(models.build("llama"), configs[kind]).eval()
    inputs = {**models.batch(5, 12), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = wrapped.generate(**inputs)
    assert plain.tolist() != models.shared("llama").generate(**inputs).tolist()
    if kind == "prefix":
        with pytest.raises(hf_paged.UnsupportedModelError, match=r"PREFIX_TUNING.*without cache_implementation"):
            wrapped.generate(**inputs, **PAGED)
    else:
        assert torch.equal(wrapped.generate(**inputs, **PAGED), plain)
    assert conftest.blocks_in_use() == 0
