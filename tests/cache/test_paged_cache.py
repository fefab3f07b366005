"""PagedKVCache against transformers' DynamicCache: in generate, in hand-written loops, and method by method."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.cache.paged_layers import PagedLayer
from hf_paged.integration.names import CACHE
from tests import models
from tests.architectures.tiny import tiny_model

LAYERS, HEADS, DIM = 2, 2, 8


def _config() -> Any:
    return models.shared("llama").config


def _states(rows: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, HEADS, tokens, DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def _feed(caches: list[Any], rows: int, tokens: int, seed: int) -> None:
    """Update every layer of all caches with the same K/V; the returned tensors must be equal."""
    for layer in range(LAYERS):
        key, value = _states(rows, tokens, 100 * seed + layer)
        results = [cache.update(key, value, layer) for cache in caches]
        for actual in results[1:]:
            assert torch.equal(actual[0], results[0][0])
            assert torch.equal(actual[1], results[0][1])


def _assert_equal(paged: PagedKVCache, plain: DynamicCache) -> None:
    paged.check_integrity()
    assert paged.get_seq_length() == plain.get_seq_length()
    assert len(paged) == len(plain)
    for query in (1, 3):
        assert paged.get_mask_sizes(query, 0) == plain.get_mask_sizes(query, 0)
    for ours, theirs in zip(paged, plain):
        if theirs[0] is not None:
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
    assert paged.batch_size == plain.layers[0].keys.shape[0]


@pytest.fixture(params=[1, 4, 16])
def block_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def _pair(block_size: int, rows: int = 3, tokens: int = 9) -> tuple[PagedKVCache, DynamicCache]:
    paged, plain = PagedKVCache(_config(), block_size=block_size), DynamicCache(config=_config())
    _feed([plain, paged], rows, tokens, 1)
    return paged, plain


# -- method by method --------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.covering(1)
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 16, 17, 40])
def test_update_and_lengths(block_size: int, tokens: int) -> None:
    paged, plain = _pair(block_size, tokens=tokens)
    _assert_equal(paged, plain)
    for step in range(6):
        _feed([plain, paged], 3, 1 + step % 2, 2 + step)
        _assert_equal(paged, plain)


@pytest.mark.smoke
def test_a_new_cache() -> None:
    cache = PagedKVCache(_config())
    assert cache.get_seq_length() == 0
    assert len(cache) == LAYERS
    assert not cache.is_initialized and not cache.is_compileable
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert [keys for keys, _, _ in cache] == [None] * LAYERS
    assert cache.stats().num_blocks == 0, "nothing is allocated before there are tokens"
    assert cache.is_sliding == [False] * LAYERS
    cache.update(*_states(2, 3, 0), 0)
    assert cache.is_even, "a layer that never stores K/V, as one that reads another's, holds as many tokens"
    cache.update(*_states(2, 3, 0), 1)
    assert cache.is_even
    cache.update(*_states(2, 1, 0), 0)
    assert not cache.is_even


CHANGES: dict[str, Callable[[Any], object]] = {
    **{f"reorder {rows}": lambda cache, rows=rows: cache.reorder_cache(torch.tensor(rows))
       for rows in ([0, 0, 2], [2, 1, 0], [1, 1, 1], [0, 1, 2])},
    "repeat": lambda cache: cache.batch_repeat_interleave(4),
    **{f"select {rows}": lambda cache, rows=rows: cache.batch_select_indices(torch.tensor(rows))
       for rows in ([2], [0, 2], [1, 0, 0], [-1])},
    # As assisted decoding does in some versions.
    **{f"crop {count}": lambda cache, count=count: cache.crop(torch.tensor(-count)) for count in (0, 1, 4, 8)},
}  # fmt: skip


@pytest.mark.smoke
@pytest.mark.covering(1)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_rows_and_lengths(block_size: int, change: str) -> None:
    paged, plain = _pair(block_size)
    used = paged.stats().blocks_used
    for cache in (paged, plain):
        CHANGES[change](cache)
    _assert_equal(paged, plain)
    assert paged.stats().blocks_used == used or change != "repeat", "repeating takes no memory"
    _feed([plain, paged], paged.num_rows, 3, 7)
    _assert_equal(paged, plain)


@pytest.mark.smoke
def test_crop_gives_blocks_back_and_spares_shared_ones() -> None:
    paged, plain = _pair(4, rows=1, tokens=10)
    child = paged.fork(0)
    paged.crop(-7)
    paged.check_integrity()
    assert paged.stats().blocks_used == 1
    assert child == 1 and paged.get_seq_length() == 3
    key, value = _states(2, 1, 5)
    for layer in range(LAYERS):
        keys, _ = paged.update(key, value, layer)
        assert torch.equal(keys[:, :, 3:], key)
        assert torch.equal(keys[:, :, :3], plain.layers[layer].keys[:, :, :3].expand(2, -1, -1, -1))


@pytest.mark.smoke
def test_fork_append_free(block_size: int) -> None:
    """A forked row shares every block until one of the two rows is written; freeing one leaves the other intact."""
    paged, plain = _pair(block_size, rows=2, tokens=6)
    used = paged.stats().blocks_used
    assert paged.fork(0) == 2
    assert paged.num_rows == 3
    assert paged.stats().blocks_used == used
    assert paged.stats().blocks_shared > 0
    plain.batch_select_indices(torch.tensor([0, 1, 0]))
    _assert_equal(paged, plain)
    _feed([plain, paged], 3, 1, 5)
    _assert_equal(paged, plain)
    if block_size > 1:
        assert paged.stats().cow_copies == (6 % block_size > 0)
    paged.free(0)
    plain.batch_select_indices(torch.tensor([1, 2]))
    _assert_equal(paged, plain)
    _feed([plain, paged], 2, 2, 6)
    _assert_equal(paged, plain)
    paged.free(1)
    paged.free(0)
    assert paged.stats().blocks_used == 0 and paged.get_seq_length() == 0


@pytest.mark.smoke
def test_append_makes_room_ahead() -> None:
    paged, plain = _pair(4)
    paged.append(8)
    used = paged.stats().blocks_used
    _feed([plain, paged], 3, 8, 5)
    assert paged.stats().blocks_used == used
    _assert_equal(paged, plain)


@pytest.mark.smoke
@pytest.mark.parametrize("options", [{"block_size": 0}, {"block_size": 1.5}, {"num_blocks": -1}, {"block_size": True}])
def test_bad_options(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        PagedKVCache(_config(), **options)


@pytest.mark.smoke
def test_memory_grows_with_the_tokens_that_exist() -> None:
    cache = PagedKVCache(_config(), block_size=4)
    sizes = []
    for step in range(60):
        key, value = _states(2, 1, step)
        for layer in range(LAYERS):
            cache.update(key, value, layer)
        stats = cache.stats()
        assert stats.blocks_used == 2 * -(-(step + 1) // 4)
        assert stats.bytes_filled == 2 * (step + 1) * LAYERS * 2 * HEADS * DIM * 4
        sizes.append(stats.bytes_reserved)
    assert sizes[0] < sizes[-1]
    assert sizes[-1] <= 2 * cache.stats().bytes_used


# -- with models -------------------------------------------------------------------------------------------------------

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


@pytest.mark.smoke
@pytest.mark.parametrize("family", models.FEW)
def test_hand_written_loop(family: str) -> None:
    """A hand-written forward loop with left padding, in which rows are freed and forked."""
    model, inputs = models.shared(family), models.batch(5, 19, 12)
    logs = []
    for cache in (DynamicCache(config=model.config), PagedKVCache(model.config, block_size=4)):
        mask, ids, log = inputs["attention_mask"], inputs["input_ids"], []
        for step in range(14):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            with torch.no_grad():
                output = model(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache}, use_cache=True)
            assert output.past_key_values is cache
            ids = output.logits[:, -1].argmax(-1, keepdim=True)
            log.append(output.logits[:, -1])
            if step == 5:  # row 1 leaves
                cache.batch_select_indices(torch.tensor([0, 2]))
                ids, mask = ids[[0, 2]], mask[[0, 2]]
            if step == 8:  # row 0 is forked: its copy goes on with another token
                if isinstance(cache, PagedKVCache):
                    cache.fork(0)
                else:
                    cache.batch_select_indices(torch.tensor([0, 1, 0]))
                ids, mask = ids[[0, 1, 0]], mask[[0, 1, 0]]
                ids[2] = (ids[2] + 1) % models.VOCAB
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logs.append(log)
    for plain, paged in zip(*logs):
        torch.testing.assert_close(paged, plain, atol=1e-3, rtol=1e-3)


@pytest.mark.smoke
@pytest.mark.parametrize("family", models.FEW)
def test_a_shared_prompt_cache_is_copied_and_continued(family: str) -> None:
    """Prefill once and deepcopy for each continuation, as in transformers' documentation."""
    model, prefix = models.shared(family), models.prompts(18)[0][None]
    prompt_cache = PagedKVCache(model.config, block_size=4)
    with torch.no_grad():
        model(prefix, **{CACHE: prompt_cache})
    for seed in range(2):
        ids = torch.cat([prefix, models.prompts(5, seed=seed)[0][None]], dim=1)
        cache = copy.deepcopy(prompt_cache)
        text = model.generate(ids, **GREEDY, **{CACHE: cache})
        assert torch.equal(text, model.generate(ids, **GREEDY))
        cache.check_integrity()
    assert prompt_cache.get_seq_length() == 18
    prompt_cache.check_integrity()


@pytest.mark.smoke
def test_sliding_layers_show_their_window() -> None:
    """Mask sizes and returned tensors equal those of transformers' sliding layers, although all K/V is kept."""
    config = models.shared("gemma3").config
    paged, plain = PagedKVCache(config, block_size=4), DynamicCache(config=config)
    assert paged.is_sliding == plain.is_sliding
    for step, tokens in enumerate((3, 1, 5, 1, 1, 20, 1, 2)):
        for layer in range(3):
            assert paged.get_mask_sizes(tokens, layer) == plain.get_mask_sizes(tokens, layer)
            key, value = _states(2, tokens, 10 * step + layer)
            ours, theirs = paged.update(key, value, layer), plain.update(key, value, layer)
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert paged.layers[0].keys.shape == plain.layers[0].keys.shape
    assert paged.get_seq_length() == plain.get_seq_length()


HYBRID = ("falcon_h1", "zamba2", "deepseek_v4", "lfm2")
VERBS: dict[str, tuple[Callable[[PagedKVCache], object], list[int]]] = {
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "select by a mask": (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    "free": (lambda cache: cache.free(1), [0, 2]), "free all": (lambda cache: [cache.free(0) for _ in range(3)], []),
    "fork": (lambda cache: cache.fork(1), [0, 1, 2, 1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
    "crop": (lambda cache: cache.crop(-1), [0, 1, 2]), "reset": (lambda cache: cache.reset(), []),
}  # fmt: skip


def _fill(cache: Any, model: Any, ids: torch.Tensor, *, record: bool) -> Any:
    if record:
        cache.activate_past_recording()
    _next_logits(model, cache, ids)
    return cache


@torch.no_grad()
def _next_logits(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, **{CACHE: cache}, use_cache=True).logits[:, -1]
    return logits


@pytest.fixture(scope="module", params=HYBRID)
def hybrid(request: pytest.FixtureRequest) -> tuple[Any, torch.Tensor]:
    """A model whose layers keep another state beside K/V, and input_ids int64 [3, 7]."""
    model, ids = tiny_model(request.param), torch.randint(6, 90, (3, 7), generator=torch.Generator().manual_seed(0))
    plain = _fill(DynamicCache(config=model.config), model, ids, record=False)
    plain.reorder_cache(torch.tensor([0, 2]))
    try:
        _next_logits(model, plain, ids[:2, :1])
    except RuntimeError:  # DeepSeek-V4's in 5.22 and older
        pytest.skip(f"{request.param}: transformers' own layers do not follow their rows")
    return model, ids


@pytest.mark.covering(1)
@pytest.mark.smoke
@pytest.mark.parametrize("verb", VERBS)
def test_states_beside_the_blocks_follow_the_rows(verb: str, hybrid: tuple[Any, torch.Tensor]) -> None:
    """What a verb leaves is what each of its rows alone would hold in a cache of transformers."""
    model, ids = hybrid
    call, rows = VERBS[verb]
    cache = _fill(PagedKVCache(model.config, block_size=4), model, ids, record=verb == "crop")
    call(cache)
    cache.check_integrity()
    if not rows:
        assert cache.num_rows == 0 and cache.stats().blocks_used == 0
    new = torch.randint(6, 90, (len(rows) or 2, 2), generator=torch.Generator().manual_seed(1))
    got = [_next_logits(model, cache, token) for token in new.split(1, dim=1)]
    for row in range(len(new)):
        alone = DynamicCache(config=model.config)
        if rows:
            _fill(alone, model, ids[rows[row]][None], record=verb == "crop")
        if verb == "crop":
            alone.crop(-1)
        for step, token in enumerate(new[row].tolist()):
            expected = _next_logits(model, alone, torch.tensor([[token]]))
            torch.testing.assert_close(got[step][row : row + 1], expected, atol=1e-3, rtol=1e-3)


@pytest.mark.covering(1)
@pytest.mark.smoke
@pytest.mark.parametrize("verb", [verb for verb in VERBS if VERBS[verb][1]])
def test_a_verb_that_fails_in_one_layer_changes_nothing(verb: str, hybrid: tuple[Any, torch.Tensor]) -> None:
    model, ids = hybrid
    cache = _fill(PagedKVCache(model.config, block_size=4), model, ids, record=verb == "crop")
    new = torch.full((3, 1), 8)
    states = [layer for layer in cache.layers if type(layer) is not PagedLayer]
    tables = [list(cache.memory.manager.block_table(row)) for row in cache._rows.seq_ids]
    expected = _next_logits(model, copy.deepcopy(cache), new)

    class Failing(type(states[-1])):  # type: ignore[misc]
        def _fail(self, *_: object) -> None:
            raise KeyError("this layer cannot")

        crop = reorder_cache = _fail

    kind, states[-1].__class__ = type(states[-1]), Failing
    with pytest.raises(KeyError, match="this layer cannot"):
        VERBS[verb][0](cache)
    states[-1].__class__ = kind
    cache.check_integrity()
    assert tables == [list(cache.memory.manager.block_table(row)) for row in cache._rows.seq_ids]
    assert torch.equal(_next_logits(model, cache, new), expected)


@pytest.mark.smoke
def test_rows_that_do_not_exist(block_size: int) -> None:
    cache, plain = _pair(block_size)
    wrong: list[Callable[[], object]] = [
        lambda: cache.reorder_cache(torch.tensor([0, 1, 3])), lambda: cache.batch_select_indices(torch.tensor([3])),
        lambda: cache.select_rows([0, -1]), lambda: cache.fork(3), lambda: cache.fork(-1), lambda: cache.free(-1),
        lambda: cache.batch_repeat_interleave(0), lambda: cache.crop(-10),
    ]  # fmt: skip
    for call in wrong:
        with pytest.raises((IndexError, ValueError)):
            call()
        _assert_equal(cache, plain)


@pytest.mark.parametrize("given", ["a model", 16])
def test_what_is_no_config(given: object) -> None:
    config = models.shared("llama") if given == "a model" else given
    with pytest.raises(ValueError, match=r"config is a (Llama|int).*: PagedKVCache\(model\.config\)"):
        PagedKVCache(config)
