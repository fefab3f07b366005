"""TRL's GRPO trainer with the engine's rollouts, on the shipped checkpoint.

TRL is not among the test packages; it is run where it is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_paged

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from hf_paged.bridges.trl import PagedGRPOTrainer  # noqa: E402

CHECKPOINT = Path(__file__).parents[2] / "examples" / "pydoc-lm-base"
PROMPTS = ["The with statement", "A list of", "The import statement", "Objects are"]
pytestmark = pytest.mark.filterwarnings("ignore")


class Watched(PagedGRPOTrainer):
    """Notes the largest difference between the log-probabilities of rollouts and those of the loss, and the tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.differences: list[float] = []
        self.drawn: list[list[int]] = []
        self._sampled: torch.Tensor | None = None
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        before = self.engine.stats().prompt_tokens
        ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        self.prompt_tokens = self.engine.stats().prompt_tokens - before
        self.drawn += ids
        return ids, logprobs

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self._sampled = inputs.get("sampling_per_token_logps")
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._sampled = None

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Any, mask: Any, keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        result = super()._get_per_token_logps_and_entropies(model, ids, mask, keep, *args, **kwargs)
        if self._sampled is not None:
            difference = (self._sampled - result[0].detach())[mask[:, -keep:].bool()]
            self.differences.append(float(difference.abs().max()))
        return result


def load(dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=dtype)


def trainer(folder: Path, model: Any, kind: Any = Watched, own: dict[str, Any] | None = None, **config: Any) -> Any:
    rewards = lambda completions, **_: [float(sum(len(word) < 4 for word in text.split())) for text in completions]  # noqa: E731
    options = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12, "max_steps": 3}
    options |= {"logging_steps": 1, "report_to": [], "use_cpu": True, "learning_rate": 3e-4, "save_strategy": "no"}
    options |= {"disable_tqdm": True, "bf16": False, "seed": 0, **config}
    return kind(
        model=model,
        reward_funcs=rewards,
        args=trl.GRPOConfig(output_dir=str(folder), **options),
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS * 4}),
        processing_class=transformers.AutoTokenizer.from_pretrained(CHECKPOINT),
        **(own or {}),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"beta": 0.1, "top_k": 5}], ids=str)
def test_the_loss_has_the_log_probabilities_of_the_rollout(tmp_path: Path, dtype: torch.dtype, options: Any) -> None:
    made = trainer(tmp_path, load(dtype), **options)
    made.train()
    assert made.differences == [0.0] * 3
    assert len(made.drawn) == 24 and len({tuple(ids) for ids in made.drawn}) > 4
    assert all(entry["grad_norm"] > 0 for entry in made.state.log_history if "grad_norm" in entry)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_lora(tmp_path: Path, beta: float) -> None:
    """With beta, the reference is the model without its adapter."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    made = trainer(tmp_path, load(), own={"peft_config": lora}, beta=beta, learning_rate=1e-2)
    made.train()
    assert made.differences == [0.0] * 3


def test_a_second_update_has_another_ratio(tmp_path: Path) -> None:
    made = trainer(tmp_path, load(), num_iterations=2, max_steps=2)
    made.train()
    first, second = made.differences
    assert first == 0.0 and second > 0


def test_gradients_are_those_of_trl(tmp_path: Path) -> None:
    """Without `exact` the loss is all TRL's: the same rollouts give the same gradients but for rounding."""
    norms = []
    for exact in (True, False):
        made = trainer(
            tmp_path, load(), own={"exact": exact, "scheduler_config": {"batch_invariant": True}}, max_steps=2
        )
        made.train()
        norms.append([entry["grad_norm"] for entry in made.state.log_history if "grad_norm" in entry])
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-3, atol=1e-5)


def test_generations_of_a_prompt_fork_and_the_memory_goes(tmp_path: Path) -> None:
    made = trainer(tmp_path, load(), own={"sleeps": True}, max_steps=1)
    made.train()
    assert made._engine.stats().kv_bytes_reserved == 0  # asleep
    assert made.engine.stats().kv_bytes_reserved > 0
    assert made.prompt_tokens < 2 * 8  # 2 prompts, not one for each of the 8 generations


def test_plain_generation_of_trl_runs_packed(tmp_path: Path) -> None:
    """TRL replaces the model's forward by one that passes on what does not ask for its loss."""
    kwargs = {"generation_kwargs": {"cache_implementation": "paged"}, "max_steps": 1}
    with hf_paged.record_calls() as records:
        trainer(tmp_path, load(), trl.GRPOTrainer, **kwargs).train()
    assert {record.route for record in records} == {"packed"}


@pytest.mark.parametrize(("config", "message"), [
    ({"temperature": 0.7}, "temperature=0.7"),
    ({"bf16": True}, r"under autocast.*: give GRPOConfig\(bf16=False\), or load the model in bfloat16"),
    ({"use_transformers_continuous_batching": True}, "leave it out"),
])  # fmt: skip
def test_what_cannot_be_exact_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, load(), **config)


def test_a_config_of_the_scheduler_stays_exact(tmp_path: Path) -> None:
    own = {"scheduler_config": {"max_num_seqs": 8}}
    made = trainer(tmp_path, load(torch.bfloat16), own=own, max_completion_length=96, max_steps=1)
    made.train()
    assert made.differences == [0.0] and made.engine.scheduler_config.max_num_seqs == 8


def test_frozen_parts_stay_in_evaluation_mode(tmp_path: Path) -> None:
    model = load()
    made = trainer(tmp_path, model)
    model.train()
    model.model.layers[0].eval()
    assert made.engine is not None
    assert model.training and model.model.layers[1].training and not model.model.layers[0].training


def test_other_sources_of_completions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"temperature=0.3"):
        trainer(tmp_path, load(), generation_kwargs={"temperature": 0.3})
    with pytest.raises(ValueError, match="rollout_func"):
        trainer(tmp_path, load(), own={"rollout_func": lambda *_: {}})
    with pytest.raises(ValueError, match="holds no block") as caught:
        _ = trainer(tmp_path, load(), own={"cache_config": {"memory": "1KiB"}}).engine
    assert "exact" not in str(caught.value)
