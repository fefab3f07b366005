"""Types of transformers' objects, for annotations. Running the program imports nothing here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    class Model(PreTrainedModel):
        """A model that generates. What only some models have is read as it comes."""

        generation_config: GenerationConfig
        base_model: Any
        generate: Any
        prepare_inputs_for_generation: Any
        get_input_embeddings: Any
        get_decoder: Any
        eval: Any

        def __getattr__(self, name: str) -> Any: ...

    class Tokenizer(PreTrainedTokenizerBase):
        """A tokenizer that turns text into tokens. What only some have is read as it comes."""

        apply_chat_template: Any
        decode: Any

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = Tokenizer = Any
