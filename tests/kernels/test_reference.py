"""The reference against an independent implementation: dense attention with torch's fused function."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_paged.kernels import ops
from tests.kernels.cases import Case, make_batch, write_new

pytestmark = pytest.mark.smoke


def _dense(batch, seq: int, visible: torch.Tensor) -> torch.Tensor:
    """Attention of one sequence in fp64, over K/V that is read slot by slot."""
    metadata, bs = batch.metadata, batch.key_cache.shape[1]
    rows, seq_len = batch.rows(seq), int(metadata.seq_lens[seq])
    slots = [int(metadata.block_tables[seq, j // bs]) * bs + j % bs for j in range(seq_len)]
    k = batch.key_cache.flatten(0, 1)[slots].double().transpose(0, 1)
    v = batch.value_cache.flatten(0, 1)[slots].double().transpose(0, 1)
    group = batch.query.shape[1] // k.shape[0]
    out = torch.nn.functional.scaled_dot_product_attention(
        batch.query[rows].double().transpose(0, 1)[None], k.repeat_interleave(group, 0)[None],
        v.repeat_interleave(group, 0)[None], attn_mask=visible, scale=batch.options["scale"],
    )  # fmt: skip
    return out[0].transpose(0, 1)


@pytest.mark.parametrize(
    "features", [{}, {"sliding_window": 9}, {"chunk_size": 7}, {"ahead": 6}, {"ahead": 6, "sliding_window": 3}], ids=str
)
def test_reference_is_dense_attention(features: dict) -> None:
    features, ahead = dict(features), features.get("ahead")
    features.pop("ahead", None)
    case = Case(((1, 20), (4, 33), (12, 12), (9, 16)), heads=(6, 2), head_dim=8, block_size=4, ahead=ahead)
    batch = make_batch(case)
    batch.options |= features
    out = batch.run("reference")
    for seq, (query_len, seq_len) in enumerate(case.lens):
        visible = torch.zeros(query_len, seq_len, dtype=torch.bool)
        for i in range(query_len):
            p = seq_len - query_len + i
            is_both_ways = ahead is not None and p // ahead % 2 == 1
            for j in range(seq_len):
                window = features.get("sliding_window", seq_len + 1)
                chunk = features.get("chunk_size", seq_len + 1)
                same_run = is_both_ways and j // ahead == p // ahead
                visible[i, j] = (j <= p or same_run) and j > p - window and j // chunk >= p // chunk
        torch.testing.assert_close(out[batch.rows(seq)].double(), _dense(batch, seq, visible), atol=1e-6, rtol=1e-6)


def test_features_by_hand() -> None:
    """One query, two keys: softcap, ALiBi and a sink, each written out."""
    batch = make_batch(Case(((1, 2),), heads=(1, 1), head_dim=4))
    slots = batch.metadata.block_tables[0, 0]
    k, v = batch.key_cache[slots, :2, 0].double(), batch.value_cache[slots, :2, 0].double()
    q = batch.query[0, 0].double()
    scores = 0.5 * k @ q
    batch.options = {"scale": 0.5, "softcap": 1.5}
    capped = 1.5 * torch.tanh(scores / 1.5)
    torch.testing.assert_close(batch.run("reference")[0, 0].double(), capped.softmax(0) @ v, atol=1e-6, rtol=1e-6)
    batch.options = {"scale": 0.5, "alibi_slopes": torch.tensor([0.25])}
    biased = scores + torch.tensor([-0.25, 0.0])
    torch.testing.assert_close(batch.run("reference")[0, 0].double(), biased.softmax(0) @ v, atol=1e-6, rtol=1e-6)
    batch.options = {"scale": 0.5, "distance_bias": torch.tensor([[0.5, -0.25, 9.0]])}
    biased = scores + torch.tensor([-0.25, 0.5])
    torch.testing.assert_close(batch.run("reference")[0, 0].double(), biased.softmax(0) @ v, atol=1e-6, rtol=1e-6)
    batch.options = {"scale": 0.5, "sinks": torch.tensor([0.7])}
    out, lse = batch.run("reference", return_lse=True)
    weights = torch.cat([scores, torch.tensor([0.7])]).softmax(0)[:2]
    torch.testing.assert_close(out[0, 0].double(), weights @ v, atol=1e-6, rtol=1e-6)
    assert lse[0, 0].item() == pytest.approx(torch.cat([scores, torch.tensor([0.7])]).logsumexp(0).item(), abs=1e-5)


def test_write_then_read() -> None:
    key_cache, value_cache = torch.full((4, 2, 1, 3), torch.nan), torch.full((4, 2, 1, 5), torch.nan)
    key, value = torch.randn(3, 1, 3), torch.randn(3, 1, 5)
    write_new(key, value, key_cache, value_cache, torch.tensor([5, -1, 2]), impl="reference")
    assert torch.equal(key_cache[2, 1], key[0]) and torch.equal(value_cache[1, 0], value[2])
    assert int(key_cache.isnan().all(-1).sum()) == 6
    ops.copy_blocks([key_cache, value_cache], torch.tensor([[2, 0]]), impl="reference")
    assert torch.equal(key_cache[0, 1], key[0]) and torch.equal(value_cache[0, 1], value[0])


def test_bad_calls_are_refused() -> None:
    batch = make_batch(Case(((1, 2),)))
    with pytest.raises(ValueError, match="impl='fast'"):
        batch.run("fast")
    with pytest.raises(ValueError, match="sliding_window=0"):
        replace(batch, options={"scale": 1.0, "sliding_window": 0}).run("reference")
    with pytest.raises(ValueError, match="head sizes"):
        replace(batch, query=batch.query[..., :8]).run("reference")
    with pytest.raises(ValueError, match="entries for"):
        k = torch.zeros(2, 2, 32)
        write_new(k, k, batch.key_cache, batch.value_cache, torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\[n, 2\]"):
        ops.copy_blocks([batch.key_cache], torch.zeros(3, dtype=torch.long))
    copies = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="into has 0 tensors for 1 caches"):
        ops.copy_blocks([batch.key_cache], copies, into=[])
    for other in (batch.key_cache[:, 1:], batch.key_cache.half()):
        with pytest.raises(ValueError, match="do not fit those of"):
            ops.copy_blocks([batch.key_cache], copies, into=[other])
