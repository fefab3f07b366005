"""Files of a checkpoint that disagree: each is named at the start, with what the server does, and it does that."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_paged.serving.attachments import NOTHING
from hf_paged.serving.disagreements import disagreements, of_adapter, turn_ends
from hf_paged.serving.problems import Problem
from hf_paged.serving.recipe import chat_recipe, completion_recipe
from hf_paged.serving.schema import ChatRequest, CompletionRequest
from hf_paged.serving.served import ServedModel
from hf_paged.serving.settings import Settings
from tests.serving.chats import QUESTION, TEMPLATE, TOOLS
from tests.serving.harness import NAME, shared_model, tokenizer

OTHER = "<|user|>"  # a token that is no EOS for the model


def model(**eos: Any) -> Any:
    """The shared model with other configs. eos: of generation_config, and of config."""
    own = shared_model()
    made = SimpleNamespace(config=copy.deepcopy(own.config), generation_config=copy.deepcopy(own.generation_config))
    made.generation_config.eos_token_id = eos.get("generation", 2)
    made.config.eos_token_id = eos.get("config", 2)
    for name in ("get_input_embeddings", "main_input_name", "base_model"):
        setattr(made, name, getattr(own, name))
    return made


def other_tokenizer(**changes: Any) -> Any:
    made = copy.deepcopy(tokenizer())
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def served(made: Any, used: Any, **settings: Any) -> ServedModel:
    return ServedModel.of(made, used, Settings(names=(NAME,), **settings), created=0)


def chat(to: ServedModel, **fields: Any) -> Any:
    return chat_recipe(ChatRequest.model_validate({"messages": QUESTION, **fields}), to, None, NOTHING)


def completion(to: ServedModel, prompt: str, **fields: Any) -> Any:
    return completion_recipe(CompletionRequest.model_validate({"prompt": prompt, **fields}), to, None)


def eos_of(recipe: Any) -> Any:
    return recipe.submissions[0].options.generation_config.eos_token_id


def test_another_eos_of_the_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    """A chat ends at it, which its template writes; a completion ends as `generate` does."""
    used = other_tokenizer(eos_token=OTHER)
    own = used.eos_token_id
    with caplog.at_level(logging.WARNING):
        to = served(model(), used)
    assert any(f"EOS is '{OTHER}' ({own}), and generation_config has [2]" in line for line in caplog.messages)
    assert turn_ends(model(), used) == {2, own} == set(eos_of(chat(to)))
    assert eos_of(completion(to, "x")) is None, "the model's own"


def test_no_eos_but_the_tokenizers() -> None:
    """It ends what a schema ends."""
    to = served(model(generation=None), tokenizer())
    recipe = completion(to, "x", structured_outputs={"regex": "a"})
    assert recipe.eos_token_ids == (2,) and eos_of(recipe) == [2]
    assert eos_of(completion(to, "x")) is None


def test_another_eos_of_the_config() -> None:
    assert disagreements(shared_model(), tokenizer(), TEMPLATE) == []
    (line,) = disagreements(model(config=[2, 7]), tokenizer(), TEMPLATE)
    assert "config.json has the EOS [7], and generation_config has [2]" in line


def test_a_tokenizer_with_more_tokens_than_the_model() -> None:
    used = other_tokenizer()
    used.add_tokens(["<more>"])
    to = served(model(), used)
    assert "the tokenizer has 2049 tokens, and the model 2048" in disagreements(model(), used, TEMPLATE)[0]
    with pytest.raises(Problem, match=r"the text has '<more>', a token of the tokenizer \(2048\)"):
        completion(to, "a <more> b")
    recipe = completion(to, "a", bad_words=["<more>"])
    assert not recipe.submissions[0].options.generation_config.bad_words_ids, "it cannot be generated"


def test_a_template_that_ignores_tools() -> None:
    to = served(model(), tokenizer())
    assert "the chat template does not render tools" in disagreements(model(), tokenizer(), None)[0]
    for fields in ({}, {"tool_choice": "required"}):
        with pytest.raises(Problem, match="this model's chat template does not render them"):
            chat(to, tools=TOOLS, **fields)
    assert chat(to, tools=TOOLS, tool_choice="none").submissions
    assert chat(served(model(), tokenizer(), chat_template=TEMPLATE), tools=TOOLS).submissions


def test_what_an_adapter_brings(tmp_path: Path) -> None:
    own = tokenizer().chat_template
    assert of_adapter(str(tmp_path), tokenizer(), own) == []
    tokenizer().save_pretrained(tmp_path)
    assert of_adapter(str(tmp_path), tokenizer(), own) == []
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    used = other_tokenizer()
    used.add_tokens(["<more>"])
    used.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    template, added = of_adapter(str(tmp_path), tokenizer(), own)
    assert "its chat template differs" in template and "its tokenizer adds '<more>'" in added
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    (tmp_path / "tokenizer.json").write_text("no json")
    assert len(of_adapter(str(tmp_path), tokenizer(), own)) == 1
