"""`batch_invariant=True`: log-probabilities to the last bit, whatever else is in a step and however prompts are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine, SchedulerConfig, UnsupportedModelError
from hf_paged.kernels import ops, sampling
from tests import models
from tests.architectures.tiny import tiny_model

pytestmark = pytest.mark.skipif(ops.default_impl("cpu") != "native", reason="only the native kernels sum in one order")

LENGTHS = (3, 5, 17, 40, 64, 100, 7, 33, 90, 2)
EXPERTS: dict[str, Any] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 32},
}
KINDS = ("llama", "gemma3", "gpt2", *EXPERTS)
Answers = dict[int, tuple[list[int], list[float]]]


def build(kind: str, dtype: torch.dtype) -> Any:
    if kind not in EXPERTS:
        return models.build(kind).to(dtype)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=models.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, eos_token_id=None,
        **EXPERTS[kind],
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def config(seed: int, count: int, **options: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, do_sample=True, top_k=0, pad_token_id=0, seed=seed, **options)


def prompts() -> list[list[int]]:
    found = [prompt.tolist() for prompt in models.prompts(*LENGTHS)]
    found[8][:64] = found[5][:64]
    return found


def answers(
    model: Any,
    groups: list[list[int]],
    cache: CacheConfig | None = None,
    *,
    given: list[list[int]] | None = None,
    count: int = 8,
    **options: Any,
) -> Answers:
    """`count` tokens and log-probabilities of each prompt (`given`, else `prompts`); those of a group run together."""
    given, found = given or prompts(), {}
    with Engine(model, cache, SchedulerConfig(batch_invariant=True, **options)) as engine:
        for group in groups:
            outputs = engine.generate([given[i] for i in group], [config(i, count) for i in group], progress=False)
            for i, output in zip(group, outputs):
                (own,) = output.outputs
                found[i] = own.token_ids, own.logprobs
        stats = engine.stats()
    if cache is not None and stats.num_blocks == cache.num_blocks:  # one group of layers, which fills the memory
        assert stats.preemptions_recompute + stats.preemptions_swap
    return found


@pytest.mark.covering(1)
@pytest.mark.quick_cases("[llama", "[gemma3", "[gpt2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_depend_on_the_sequence_alone(kind: str, dtype: torch.dtype) -> None:
    model, every = build(kind, dtype), list(range(len(LENGTHS)))
    alone = answers(model, [[i] for i in every])
    small = CacheConfig(block_size=4, num_blocks=32, swap_memory="16MiB")
    assert answers(model, [every]) == alone
    assert answers(model, [every], max_num_batched_tokens=32) == alone
    assert answers(model, [[5], [8], every]) == alone, "cached prefixes"
    assert answers(model, [every], small, preemption="recompute") == alone
    assert answers(model, [every], small, preemption="swap") == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("lfm2", torch.bfloat16), ("qwen3_next", torch.float32), ("mamba2", torch.bfloat16)]
)
def test_models_with_states(name: str, dtype: torch.dtype) -> None:
    """Each token of a prompt is computed by itself, so that it does not matter where prompts are cut."""
    model = tiny_model(name).to(dtype)
    given = [[6 + token % 80 for token in prompts()[i][:24]] for i in (2, 5, 6, 8, 9)]
    every = list(range(len(given)))
    alone = answers(model, [[i] for i in every], given=given)
    assert answers(model, [every], given=given) == alone
    assert answers(model, [every], given=given, max_num_batched_tokens=16) == alone
    assert answers(model, [[1], [3], every], given=given) == alone, "cached prefixes"
    if name != "mamba2":  # which has no blocks
        small = CacheConfig(block_size=4, num_blocks=16, swap_memory="16MiB")
        assert answers(model, [every], small, given=given, preemption="recompute") == alone
        assert answers(model, [every], small, given=given, preemption="swap") == alone


@pytest.mark.covering(1)
@pytest.mark.quick_cases("[deepseek_v3", "[gpt_oss")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gpt_oss", "lfm2", "deepseek_v3"])
def test_64_requests(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name).to(dtype) if name in ("lfm2", "deepseek_v3") else build(name, dtype)
    given = [[6 + i, *range(7, 7 + i % 13)] for i in range(64)]
    some = range(2, 64, 7)  # at any place in a tile of 4, 8 or 16 rows
    alone = answers(model, [[i] for i in some], given=given, count=4)
    together = answers(model, [list(range(64))], given=given, count=4, max_num_seqs=64)
    assert {i: together[i] for i in some} == alone


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_several_chunks_of_keys(kind: str, dtype: torch.dtype) -> None:
    """The kernel divides keys into chunks of 128, and reads a chunk once for sequences that have its blocks."""
    model = models.build(kind, max_position_embeddings=512).to(dtype)
    first, *others = (prompt.tolist() for prompt in models.prompts(330, 5, 60, 9, 127, 128, 129, 255))
    given = [first, first[:260] + others[0], first[:260] + others[1], first[:131] + others[2], first[:256], *others[3:]]
    every = list(range(len(given)))
    alone = answers(model, [[i] for i in every], given=given, count=4)
    assert answers(model, [every], given=given, count=4) == alone
    assert answers(model, [every], given=given, count=4, max_num_batched_tokens=50) == alone
    assert answers(model, [[0], every], given=given, count=4) == alone, "cached prefixes, whose chunks are shared"


def test_log_probabilities_of_a_row_do_not_depend_on_other_rows() -> None:
    """The numbers of a row beside rows of infinite logits, and with a vocabulary of no whole vectors on two threads."""
    torch.manual_seed(0)
    logits, before = 3 * torch.randn(16, 50257), torch.get_num_threads()
    tokens = torch.randint(0, 50257, (16,))
    torch.set_num_threads(2)
    try:
        rows = [(logits[i : i + 1], tokens[i : i + 1]) for i in range(16)]
        alone = torch.cat([sampling.raw_logprobs(*row, torch.Tensor.float) for row in rows])
        top_alone = torch.cat([sampling.top_logprobs(row, 3)[1] for row, _ in rows])
        assert sampling.top_logprobs(logits, 3)[1].equal(top_alone)
        for bad in (torch.inf, torch.nan):
            logits[0, 7] = bad
            assert sampling.raw_logprobs(logits, tokens, torch.Tensor.float)[1:].equal(alone[1:])
            assert sampling.top_logprobs(logits, 3)[1][1:].equal(top_alone[1:])
    finally:
        torch.set_num_threads(before)
    largest = sampling.top_logprobs(logits[1:], 1)
    assert largest[1].squeeze(1).equal(sampling.raw_logprobs(logits[1:], largest[0].squeeze(1), torch.Tensor.float))


@pytest.mark.slow
def test_threads() -> None:
    model, every = build("gemma3", torch.float32), list(range(len(LENGTHS)))
    alone, before = answers(model, [[i] for i in every]), torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert answers(model, [every]) == alone
    finally:
        torch.set_num_threads(before)


def test_it_is_refused_where_it_cannot_be_had() -> None:
    asked = SchedulerConfig(batch_invariant=True)
    with pytest.raises(ValueError, match=r"batch_invariant='yes': use True or False"):
        SchedulerConfig(batch_invariant="yes")  # type: ignore[arg-type]
    bloom = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match="batch_invariant=True: the model reads a dense view"):
        Engine(transformers.BloomForCausalLM(bloom).eval(), None, asked)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_code_of_others_is_refused(name: str) -> None:
    """It may look at the whole batch."""
    model = tiny_model(name)
    with Engine(model, None, SchedulerConfig(batch_invariant=True)) as engine:
        handle = model.model.layers[0].register_forward_hook(lambda module, args, output: None)
        try:
            output = engine.generate([[5, 6, 7]], config(0, 4), progress=False, raise_on_error=False)[0]
        finally:
            handle.remove()
        assert output.error is not None and "batch_invariant=True" in output.error
        assert isinstance(output.exception, UnsupportedModelError)


def test_a_product_of_another_kind_raises() -> None:
    """What the trial did not see is not left to torch in silence."""
    from hf_paged.fused.cpu.one_order import OneOrder

    rows = torch.randn(2, 3, 4)
    with OneOrder() as products:
        torch.baddbmm(rows[:, :, :3], rows, rows.transpose(1, 2))
    assert list(products.left) == ["baddbmm"]
    products.is_strict = True
    with products, pytest.raises(UnsupportedModelError, match="baddbmm of torch"):
        torch.baddbmm(rows[:, :, :3], rows, rows.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_are_those_of_torch_but_for_rounding(dtype: torch.dtype) -> None:
    from hf_paged.fused.cpu.one_order import OneOrder

    rows, weight, bias = torch.randn(5, 48).to(dtype), torch.randn(48, 40).to(dtype), torch.randn(40).to(dtype)
    experts, ends = torch.randn(3, 48, 40).to(dtype), torch.tensor([2, 2, 5], dtype=torch.int32)

    def products() -> list[torch.Tensor]:
        linear = torch.nn.functional.linear
        return [
            rows @ weight, torch.addmm(bias, rows, weight), linear(rows, weight.t().contiguous(), bias),
            linear(rows.view(1, 5, 48), weight.t()), torch.cat([rows[:2] @ experts[0], rows[2:] @ experts[2]]),
            torch.bmm(rows.expand(3, 5, 48), experts),
        ]  # fmt: skip

    plain = products()
    with torch.inference_mode(), OneOrder() as mode:
        ours = products()
        assert torch.nn.functional.linear(rows[:0].view(1, 0, 48), weight.t()).shape == (1, 0, 40)
        grouped = torch._grouped_mm(rows, experts, offs=ends) if dtype == torch.bfloat16 else plain[4]
    assert not mode.left
    for left, right in zip([*ours, grouped], [*plain, plain[4]]):
        torch.testing.assert_close(left, right, atol=0.06 if dtype != torch.float32 else 1e-4, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_states(dtype: torch.dtype) -> None:
    """What recurrent layers compute for rows of one token each: the numbers of torch but for rounding, also alone."""
    from hf_paged.fused.cpu.one_order import OneOrder

    states, vectors, keys = (
        torch.randn(6, 8, 16).to(dtype),
        torch.randn(6, 16, 1).to(dtype),
        torch.randn(6, 8, 16).to(dtype),
    )
    x, taps, bias = torch.randn(6, 12, 4).to(dtype), torch.randn(12, 1, 4).to(dtype), torch.randn(12).to(dtype)

    def computed(rows: slice) -> list[torch.Tensor]:
        convolved = [torch.nn.functional.conv1d(x[rows], taps, bias, padding=pad, groups=12) for pad in (0, 3)]
        return [states[rows] @ vectors[rows], states[rows] @ keys[rows].mT, *convolved]

    plain = computed(slice(6))
    with OneOrder(by_token=True) as mode:
        together, alone = computed(slice(6)), computed(slice(2, 3))
    assert not mode.left
    for ours, row, theirs in zip(together, alone, plain):
        assert ours[2:3].equal(row)
        torch.testing.assert_close(ours, theirs, atol=0.06 if dtype != torch.float32 else 1e-5, rtol=0.02)


@pytest.mark.slow
def test_a_model_with_other_results_token_by_token_is_refused() -> None:
    with pytest.raises(ValueError, match="token by token"):
        Engine(tiny_model("zamba2"), None, SchedulerConfig(batch_invariant=True))
