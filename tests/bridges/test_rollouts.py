"""TRL's trainers with rollouts of an engine, on the shipped checkpoint.

TRL is not among the test packages; it is run where it is installed.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import io
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers

import hf_paged

accelerate = pytest.importorskip("accelerate")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from hf_paged.bridges.trl import PagedGRPOTrainer  # noqa: E402
from hf_paged.rollouts import attach, rollout_func  # noqa: E402
from tests.parallel import ranks  # noqa: E402

CHECKPOINT = Path(__file__).parents[2] / "examples" / "pydoc-lm-qa"
PROMPTS = ["The with statement", "A list of", "The import statement", "Objects are"] * 6
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]
ANSWER = {"role": "assistant", "content": "It is so."}
DATA = {
    "text": {"prompt": PROMPTS},
    "chat": {"prompt": CHATS},
    "answers": {"messages": [[*chat, ANSWER] for chat in CHATS]},
    "context": {"prompt": CHATS, "privileged_context": ["It is so."] * len(CHATS)},
}
LENGTH, GROUPS = {"max_completion_length": 12}, {"num_generations": 4, "per_device_train_batch_size": 8}
TRAINERS: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "GRPO": ("trl", LENGTH | GROUPS, "text", ("reward_funcs",)),
    "RLOO": ("trl", LENGTH | GROUPS, "text", ("reward_funcs",)),
    "Distillation": ("trl", LENGTH, "chat", ("teacher_model",)),
    "GMPO": ("gmpo", LENGTH | GROUPS, "text", ("reward_funcs",)),
    "GKD": ("gkd", {"max_new_tokens": 12, "lmbda": 1.0}, "answers", ("teacher_model",)),
    "GOLD": ("gold", LENGTH | {"lmbda": 1.0}, "answers", ("teacher_model",)),
    "OnlineDPO": ("online_dpo", {"max_new_tokens": 12}, "chat", ("reward_funcs",)),
    "SDPO": ("sdpo", LENGTH | GROUPS, "context", ("reward_funcs",)), "SDFT": ("sdft", LENGTH, "context", ()),
    "A2PO": ("a2po", LENGTH, "text", ("reward_funcs",)), "IWOPD": ("iw_opd", LENGTH, "answers", ("teacher_model",)),
}  # fmt: skip
"""Module, options, data and arguments of each trainer that generates in its own process."""
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def load(dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=dtype)


def teacher() -> Any:
    model = load()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    return model


def reward(completions: list[Any], completion_ids: Any = None, **_: Any) -> list[float]:
    """1 for an even number of letters, else 0: A2PO wants one of these."""
    return [float(len(str(text)) % 2 == 0) for text in completions]


def made(folder: Path, name: str = "GRPO", own: dict[str, Any] | None = None, kind: Any = None, **config: Any) -> Any:
    """A trainer of 3 steps, with TRL's defaults but for sizes."""
    home, options, data, arguments = TRAINERS[name]
    module = importlib.import_module(home if home == "trl" else f"trl.experimental.{home}")
    options = {"max_steps": 3, "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True} | options
    options |= {"save_strategy": "no"} | config
    given = {"reward_funcs": reward, "teacher_model": teacher} | (own or {})
    values = {key: given[key]() if given[key] is teacher else given[key] for key in arguments}
    values |= {"model": load(), "train_dataset": datasets.Dataset.from_dict(DATA[data])} | (own or {})
    return (kind or getattr(module, f"{name}Trainer"))(
        args=getattr(module, f"{name}Config")(output_dir=str(folder), **options),
        **({"processing_class": transformers.AutoTokenizer.from_pretrained(CHECKPOINT)} | values),
    )


def watched(trainer: Any, **options: Any) -> Any:
    """A trainer with rollouts, that notes its completions, their log-probabilities and those of the loss."""
    rollouts = attach(trainer, **options)
    turn, logps, loss = trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies, trainer._compute_loss
    trainer.drawn, trainer.differences, trainer.sampled = [], [], None

    def drawing(*args: Any, **kwargs: Any) -> Any:
        ids, logprobs = turn(*args, **kwargs)
        trainer.drawn += ids
        trainer.prompt_tokens = rollouts.engine.stats().prompt_tokens
        return ids, logprobs

    def computing(model: Any, inputs: Any) -> Any:
        trainer.sampled = inputs.get("sampling_per_token_logps")
        try:
            return loss(model, inputs)
        finally:
            trainer.sampled = None

    def scoring(model: Any, ids: Any, mask: Any, keep: int, *args: Any, **kwargs: Any) -> Any:
        result = logps(model, ids, mask, keep, *args, **kwargs)
        if trainer.sampled is not None:
            # The tokens of a tool are nobody's.
            own = mask[:, -keep:].bool() & (trainer.sampled != 0)
            trainer.differences.append(float((trainer.sampled - result[0].detach())[own].abs().max()))
        return result

    trainer._generate_single_turn, trainer._compute_loss = drawing, computing
    trainer._get_per_token_logps_and_entropies = scoring
    return trainer


def logged(trainer: Any, *names: str) -> list[list[float]]:
    entries = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [[float(entry[name]) for entry in entries] for name in names]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_trains_as_with_plain_generate(tmp_path: Path, name: str) -> None:
    """Greedy, because otherwise the rows of some trainers draw in another order."""
    found = []
    for attached in (False, True):
        trainer = made(tmp_path, name, bf16=False)
        trainer.generation_config.do_sample = False
        if attached:
            rollouts = attach(trainer)
        trainer.train()
        found.append(logged(trainer, "loss", "grad_norm"))
    assert rollouts.engine.stats().generated_tokens >= 3 * 12
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    assert max(found[0][1]) > 0 or name in ("GRPO", "RLOO", "GMPO", "SDPO")  # equal samples have no advantage


@pytest.mark.parametrize("name", TRAINERS)
def test_defaults(tmp_path: Path, name: str) -> None:
    trainer = made(tmp_path, name)
    assert trainer.args.bf16 and trainer.args.gradient_checkpointing
    rollouts = attach(trainer)
    trainer.train()
    assert trainer.state.global_step == 3 and rollouts.engine.stats().generated_tokens >= 3 * 12


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_samples_are_those_of_plain_generate(tmp_path: Path, name: str) -> None:
    found = []
    for attached in (False, True):
        texts: list[Any] = []
        count = lambda completions, texts=texts, **_: texts.append(completions) or reward(completions)  # noqa: E731
        trainer = made(tmp_path, name, {"reward_funcs": count}, bf16=False)
        if attached:
            attach(trainer)
        trainer.train()
        found.append(texts)
    assert len({text for step in found[0] for text in step}) > 6
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [{}, {"gradient_checkpointing": False, "bf16": False}, {"beta": 0.1, "top_k": 5},
    {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}], ids=str)  # fmt: skip
def test_the_loss_has_the_log_probabilities_of_the_rollout(tmp_path: Path, dtype: torch.dtype, config: Any) -> None:
    trainer = watched(made(tmp_path, own={"model": load(dtype)}, learning_rate=1e-3, **config), exact=True)
    trainer.train()
    assert trainer.differences == [0.0] * 3
    assert len({tuple(ids) for ids in trainer.drawn}) > 4 and max(logged(trainer, "grad_norm")[0]) > 0


def test_rloo_reads_the_log_probabilities_of_the_rollout(tmp_path: Path) -> None:
    trainer = made(tmp_path, "RLOO", max_steps=1)
    rollouts = attach(trainer, exact=True)
    draw, logps = rollouts.draw, trainer._get_per_token_logps_and_entropies
    drawn, scored = [], []

    def scoring(model: Any, ids: Any, mask: Any, keep: int, *args: Any, **kwargs: Any) -> Any:
        result = logps(model, ids, mask, keep, *args, **kwargs)
        own = mask[:, -keep:].bool()
        scored.extend(zip((row[kept].tolist() for row, kept in zip(ids[:, -keep:], own)),
                          (row[kept].tolist() for row, kept in zip(result[0].detach(), own))))  # fmt: skip
        return result

    trainer._get_per_token_logps_and_entropies = scoring
    rollouts.draw = lambda *args: drawn.extend(draw(*args)) or drawn
    trainer.train()
    expected = {tuple(own.token_ids): torch.tensor(own.logprobs).tolist() for own in drawn}
    assert len(scored) >= 2 * 8  # before the update, by the model that drew, and in the loss
    reference = [values for ids, values in scored if values == expected[tuple(ids)]]
    assert len(reference) >= 2 * 8


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=str)
def test_adapters(tmp_path: Path, options: dict[str, Any]) -> None:
    """The adapter that is trained draws; with beta, the reference is the model without it."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0, **options)
    trainer = made(tmp_path, own={"peft_config": lora}, beta=0.1, learning_rate=5e-2)
    trainer = watched(trainer, exact=True)
    trainer.train()
    assert trainer.differences == [0.0] * 3
    model, engine = trainer.accelerator.unwrap_model(trainer.model), trainer._hf_paged_rollouts.engine
    model.eval()
    with model.disable_adapter():
        (base,) = engine.score([[5, 6, 7]], [[8, 9]])
    (own,) = engine.score([[5, 6, 7]], [[8, 9]])
    assert not torch.equal(base, own)


def test_a_second_update_has_another_ratio(tmp_path: Path) -> None:
    trainer = watched(made(tmp_path, num_iterations=2, max_steps=2, learning_rate=1e-3), exact=True)
    trainer.train()
    first, second = trainer.differences
    assert first == 0.0 and second > 0


def test_gradients_are_those_of_trl(tmp_path: Path) -> None:
    """Without `exact` the loss is all TRL's: the same rollouts give the same gradients but for rounding."""
    norms = []
    for exact in (True, False):
        trainer = made(tmp_path, bf16=False, max_steps=2)
        attach(trainer, exact=exact, scheduler_config={"batch_invariant": True})
        trainer.train()
        norms += logged(trainer, "grad_norm")
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-3, atol=1e-5)


def test_generations_of_a_prompt_fork_and_the_memory_goes(tmp_path: Path) -> None:
    trainer = watched(made(tmp_path, max_steps=1))
    trainer.train()
    engine = trainer._hf_paged_rollouts._engine
    assert engine.stats().kv_bytes_reserved == 0  # asleep
    assert trainer._hf_paged_rollouts.engine.stats().kv_bytes_reserved > 0
    assert trainer.prompt_tokens < 2 * 8  # 2 prompts, not one for each of the 8 generations


def test_evaluation_and_resumed_checkpoints(tmp_path: Path) -> None:
    """What a resumed run draws is what the uninterrupted one did."""
    config = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    config |= {"per_device_eval_batch_size": 4, "learning_rate": 1e-3, "max_steps": 2}
    own = {"eval_dataset": datasets.Dataset.from_dict({"prompt": PROMPTS[:2]})}
    drawn = []
    for resumed in (None, str(tmp_path / "checkpoint-1")):
        trainer = watched(made(tmp_path, own=own, **config), exact=True)
        trainer.train(resume_from_checkpoint=resumed)
        assert trainer.differences and set(trainer.differences) == {0.0}
        assert any("eval_reward" in entry for entry in trainer.state.log_history)
        drawn.append(trainer.drawn)
    assert drawn[0][-8:] == drawn[1][-8:] and len(drawn[1]) < len(drawn[0])


def test_rollout_func(tmp_path: Path) -> None:
    """It draws what `attach` draws."""
    drawn = []
    for own in ({"rollout_func": functools.partial(rollout_func, exact=True)}, {}):
        trainer = made(tmp_path, own=own)
        if not own:
            attach(trainer, exact=True)
        trainer.train()
        assert trainer._hf_paged_rollouts.exact
        drawn.append(logged(trainer, "loss", "reward", "grad_norm"))
    assert drawn[0] == drawn[1]


def test_several_turns_keep_the_prefix(tmp_path: Path) -> None:
    """A rollout function of one's own: two turns with a text of the environment in between, which no loss reads."""

    def play(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rollouts = attach(trainer)
        ids = trainer.processing_class(prompts)["input_ids"]
        first = rollouts.draw(ids)
        between = trainer.processing_class(" and so on until the end")["input_ids"]
        so_far = [[*prompt, *own.token_ids, *between] for prompt, own in zip(ids, first)]
        before = rollouts.engine.stats()
        second = rollouts.draw(so_far)
        cached.append(rollouts.engine.stats().prefix_cache_hit_tokens - before.prefix_cache_hit_tokens)
        rows = list(zip(first, second))
        return {
            "prompt_ids": ids,
            "completion_ids": [[*a.token_ids, *between, *b.token_ids] for a, b in rows],
            "logprobs": [[*a.logprobs, *[0.0] * len(between), *b.logprobs] for a, b in rows],
            "env_mask": [[1] * len(a.token_ids) + [0] * len(between) + [1] * len(b.token_ids) for a, b in rows],
        }

    cached: list[int] = []
    trainer = made(tmp_path, own={"rollout_func": play}, max_completion_length=20)
    watched(trainer, exact=True).train()
    assert trainer.differences == [0.0] * 3 and min(cached) > 0


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their product.
    """
    return a * b


@pytest.mark.parametrize("by_function", [True, False])
def test_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_function: bool) -> None:
    """Each completion calls a tool once; the turn after it finds the K/V of what was before."""
    inside = importlib.import_module("trl.trainer.grpo_trainer")
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}
    turns: list[int] = []

    def parsed(tokenizer: Any, ids: list[int], prefix: list[int], **_: Any) -> dict[str, Any]:
        is_first = "tool_response" not in tokenizer.decode(prefix)
        turns.append(is_first)
        return {"role": "assistant", "content": "so", **({"tool_calls": [call]} if is_first else {})}

    monkeypatch.setattr(inside, "parse_response", parsed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    own: dict[str, Any] = {"tools": [multiply], "processing_class": tokenizer, "chat": DATA["chat"]}
    own["train_dataset"] = datasets.Dataset.from_dict(own.pop("chat"))
    if by_function:
        own["rollout_func"] = functools.partial(rollout_func, exact=True)
    trainer = made(tmp_path, own=own, max_completion_length=200)
    trainer.generation_config.max_new_tokens = 12
    if not by_function:
        attach(trainer, exact=True)
    trainer.train()
    stats = trainer._hf_paged_rollouts.engine.stats()
    assert turns.count(True) == turns.count(False) == 3 * 8
    assert stats.prefix_cache_hit_tokens > 0
    assert logged(trainer, "tools/call_frequency") == [[1.0] * 3]


@pytest.mark.parametrize("way", ["function", "attach", "exact"])
def test_images(tmp_path: Path, way: str) -> None:
    """Greedy: what plain `generate` of TRL draws for the same pictures."""
    seeing = pytest.importorskip("tests.serving.seeing")
    pictures = [seeing.Image.open(io.BytesIO(seeing.picture(shade))).convert("RGB") for shade in (3, 90, 180, 240)]
    data = datasets.Dataset.from_list([{"prompt": chat, "image": pictures[k % 4]} for k, chat in enumerate(CHATS[:12])])
    found = []
    for attached in (False, True):
        texts: list[Any] = []
        count = lambda completions, texts=texts, **_: texts.append(completions) or reward(completions)  # noqa: E731
        own = {"model": copy.deepcopy(seeing.model()), "processing_class": seeing.processor(), "train_dataset": data}
        own["reward_funcs"] = count
        if attached and way == "function":
            own["rollout_func"] = rollout_func
        trainer = made(tmp_path, own=own, bf16=False)
        trainer.generation_config.do_sample = False
        if attached and way != "function":
            trainer = watched(trainer, exact=way == "exact")
        with hf_paged.record_calls() as records:
            trainer.train()
        found.append(texts)
    if way == "exact":
        assert trainer.differences == [0.0] * 3 and not records
    else:
        assert {record.route for record in records} == {"packed"} and len(records) == 3
    assert found[0] == found[1] and len({str(text) for step in found[0] for text in step}) > 2


def test_plain_generation_of_trl_runs_packed(tmp_path: Path) -> None:
    """TRL replaces the model's forward by one that passes on what does not ask for its loss."""
    with hf_paged.record_calls() as records:
        made(tmp_path, generation_kwargs={"cache_implementation": "paged"}, max_steps=1, bf16=False).train()
    assert {record.route for record in records} == {"packed"}


def test_a_copy_of_the_model_has_its_own_weights(tmp_path: Path) -> None:
    """Both have the `generate` that somebody has set on the model, once no trainer draws with them."""
    trainer, called = made(tmp_path), []

    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(model)
        return type(model).generate(model, *args, **kwargs)

    before = trainer.model.generate = MethodType(generate, trainer.model)
    attach(trainer)
    other = copy.deepcopy(trainer.model)
    del other.forward  # TRL's, which is of the model that was copied
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(-9)
    ids, config = torch.tensor([[5, 6, 7]]), transformers.GenerationConfig(max_new_tokens=4)
    answers = [model.generate(ids, generation_config=config).tolist() for model in (trainer.model, other, load())]
    assert answers[0] == answers[2] != answers[1]
    model, trainer = trainer.model, None
    gc.collect()
    assert model.generate(ids, generation_config=config).tolist() == answers[0]
    assert called == [model, other, model] and model.generate == before  # at first for ids by position


def test_frozen_parts_stay_in_evaluation_mode(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    rollouts = attach(trainer)
    trainer.model.train()
    trainer.model.model.layers[0].eval()
    assert rollouts.engine is not None
    layers = trainer.model.model.layers
    assert trainer.model.training and layers[1].training and not layers[0].training


@pytest.mark.parametrize(("name", "config", "options", "message"), [
    ("GRPO", {"temperature": 0.7}, {"exact": True}, "temperature=0.7"),
    ("GRPO", {"generation_kwargs": {"temperature": 0.3}}, {"exact": True}, "temperature=0.3"),
    ("GRPO", {"use_transformers_continuous_batching": True}, {}, "use_transformers_continuous_batching=True.*leave it"),
    ("GKD", {}, {"exact": True}, "the loss of GKDTrainer is of no log-probabilities"),
    ("GRPO", {}, {"cache_config": {"num_block": 1}}, "num_block"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_the_first_step(
    tmp_path: Path, name: str, config: Any, options: Any, message: str
) -> None:
    trainer = made(tmp_path, name, **config)
    with pytest.raises((ValueError, TypeError), match=message):
        attach(trainer, **options)


@pytest.mark.parametrize("config", [{"pixel_values": torch.zeros(1)}, {"num_beams": 2}], ids=str)
def test_what_no_engine_draws_is_not_exact(tmp_path: Path, config: dict[str, Any]) -> None:
    trainer = made(tmp_path)
    attach(trainer, exact=True)
    beams = transformers.GenerationConfig(max_new_tokens=4, num_beams=config.pop("num_beams", 1))
    with pytest.raises(ValueError, match=r"(pixel_values|num_beams or .*): exact=True is for one answer to a prompt"):
        trainer.model.generate(input_ids=torch.tensor([[5, 6]]), generation_config=beams, **config)


def test_other_engines_and_trainers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rollout_func draws the completions"):
        made(tmp_path, own={"rollout_func": lambda *_: {}}, kind=PagedGRPOTrainer)
    trainer = made(tmp_path, kind=PagedGRPOTrainer, own={"cache_config": {"memory": "1KiB"}})
    with pytest.raises(ValueError, match="holds no block") as caught:
        _ = trainer.engine
    assert "exact" not in str(caught.value)
    with pytest.raises(ValueError, match="cache_config, exact: the trainer has an engine with other options"):
        attach(trainer, cache_config={"memory": "1MiB"})
    assert attach(trainer) is trainer.rollouts
    rows = datasets.Dataset.from_dict({"prompt": PROMPTS[:2], "completion": PROMPTS[:2]})
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    with pytest.raises(ValueError, match="SFTTrainer calls no generate"):
        attach(trl.SFTTrainer(model=load(), train_dataset=rows, processing_class=tokenizer,
                              args=trl.SFTConfig(str(tmp_path), use_cpu=True, report_to=[])))  # fmt: skip


def by_divided(say: Any, folder: str, config: dict[str, Any]) -> None:
    if "fsdp" in config:
        # By itself accelerate divides nothing on CPUs: it is to take these processes for those of GPUs.
        accelerate.PartialState(cpu=True, backend="gloo").distributed_type = accelerate.DistributedType.MULTI_GPU
    for attached in (False, True):
        texts: list[Any] = []
        count = lambda completions, texts=texts, **_: texts.append(completions) or reward(completions)  # noqa: E731
        own: dict[str, Any] = {"reward_funcs": count}
        if not {"fsdp", "deepspeed"} & config.keys():
            spread: Any = transformers.distributed.DistributedConfig(fsdp_size=2)
            own["model"] = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, distributed_config=spread)
        name = "GRPO" if "bf16" in config else "RLOO"
        if attached and name == "GRPO":
            own["rollout_func"] = rollout_func  # which attaches in the first step
        trainer = made(Path(folder), name, own, max_steps=2, **{"bf16": False} | config)
        if attached and name == "RLOO":
            attach(trainer)
        trainer.train()
        rollouts = attach(trainer) if attached else None
        say((texts, rollouts and (rollouts.engine.stats().generated_tokens, rollouts.engine.model.dtype)))


ZERO3 = {"train_micro_batch_size_per_gpu": 8, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 3}}


@pytest.mark.slow
@pytest.mark.parametrize("config", [
    {"deepspeed": ZERO3, "ds3_gather_for_generation": False},
    {"fsdp": True, "accelerator_config": {"use_configured_state": True}},
    {"fsdp": True, "accelerator_config": {"use_configured_state": True}, "bf16": True},
    {},
], ids=["zero3", "fsdp2", "fsdp2 in bf16", "fsdp2 of transformers"])  # fmt: skip
def test_rollouts_of_divided_weights_are_those_of_plain_generate(tmp_path: Path, config: dict[str, Any]) -> None:
    if "deepspeed" in config:
        pytest.importorskip("deepspeed")
    config |= {"ddp_backend": "gloo", "learning_rate": 0.1}
    for (expected, _), (found, (generated, dtype)) in ranks.run(2, by_divided, str(tmp_path), config):
        assert generated >= 24 and len({str(step) for step in found}) == 2
        # In bf16 packed rows round otherwise than padded ones.
        assert dtype is torch.bfloat16 if "bf16" in config else found == expected
