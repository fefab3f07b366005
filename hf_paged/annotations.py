"""Types of transformers' objects, for annotations. Running the program imports nothing here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    class Model(PreTrainedModel):
        """A model that generates. What only some models have is read as it comes."""

        generation_config: GenerationConfig
        generate: Any
        prepare_inputs_for_generation: Any
        get_input_embeddings: Any
        get_decoder: Any
        eval: Any

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = Any
