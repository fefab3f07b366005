"""`PagedSentenceTransformer` gives the vectors of sentence-transformers' own forward."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from hf_paged.bridges.sentence_transformers import PagedSentenceTransformer

TEXTS = ["A list is a sequence.", "A tuple is a sequence of things that may not change.", "x", "Files are closed."]


@pytest.mark.parametrize("pooling", ["mean", "lasttoken", "cls"])
def test_vectors(pooling: str) -> None:
    transformer = Transformer("examples/pydoc-lm-base")
    transformer.tokenizer.pad_token = transformer.tokenizer.eos_token
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling), Normalize()]
    options: Any = {"modules": modules, "device": "cpu", "prompts": {"query": "Find: "}}
    own, paged = SentenceTransformer(**options), PagedSentenceTransformer(**options, cache_config={"num_blocks": 64})
    for given in ({}, {"prompt_name": "query", "batch_size": 3}, {"truncate_dim": 8, "normalize_embeddings": True}):
        np.testing.assert_allclose(paged.encode(TEXTS, **given), own.encode(TEXTS, **given), atol=2e-5)
    assert paged.encode(TEXTS[0], convert_to_tensor=True).shape == (160,)
    np.testing.assert_allclose(paged.encode_query(TEXTS), own.encode_query(TEXTS), atol=2e-5)
    with pytest.raises(ValueError, match="output_value='token_embeddings': the engine returns"):
        paged.encode(TEXTS, output_value="token_embeddings")
    with pytest.raises(ValueError, match=r"pooling_mode='max': an engine computes .* use SentenceTransformer"):
        PagedSentenceTransformer(modules=[transformer, Pooling(160, pooling_mode="max")], device="cpu")
    with pytest.raises(ValueError, match="pixel_values: the engine takes texts alone"):
        paged(paged.preprocess(TEXTS) | {"pixel_values": paged.preprocess(TEXTS)["input_ids"]})
    paged.train()
    with pytest.raises(ValueError, match="computes no gradients"):
        paged(paged.preprocess(TEXTS))
    paged.eval().close()
    with pytest.raises(RuntimeError, match="closed"):
        paged.encode(TEXTS)
    engine = PagedSentenceTransformer(**options, cache_config={"num_blocks": 64}).engine
    gc.collect()
    with pytest.raises(RuntimeError, match="closed"):
        engine.embed([[5]])
