"""What the encoder of a tiny model reads: four rows of different lengths, by the name of its main input."""

from __future__ import annotations

from typing import Any

import torch

TEXTS = (5, 19, 12, 26)


def encoder_rows(model: Any) -> list[dict[str, torch.Tensor]]:
    """Arguments of `generate` for each row. Raises ValueError for an input that is not known here."""
    generator = torch.Generator().manual_seed(0)
    config, name = model.config, model.main_input_name

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=generator)

    if name == "input_ids":
        rows = [{name: torch.randint(6, 90, (1, length), generator=generator)} for length in TEXTS]
        return [{**row, **on_page(model, row[name])} for row in rows]
    if name == "pixel_values":
        own = getattr(config, "vision_config", None) or config.encoder
        return [{name: noise(own.num_channels, own.image_size, own.image_size)} for _ in TEXTS]
    if name == "flattened_patches":
        rows = [{name: noise(length, 2 + config.vision_config.patch_embed_hidden_size)} for length in TEXTS]
        for row in rows:  # each patch begins with its row and column
            row[name][..., :2] = torch.arange(1, row[name].shape[1] + 1)[:, None] % 7
        return rows
    if name in ("input_values", "inputs"):
        return [{name: noise(length)} for length in (4000, 6400, 4000, 4800)]
    if name == "input_features":
        if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):  # recordings of 30 seconds
            start = torch.tensor([[1]])  # Whisper's own `generate` is another one
            size = config.num_mel_bins, 2 * config.max_source_positions
            return [{name: noise(*size), "decoder_input_ids": start} for _ in TEXTS]
        names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
        parts = (getattr(config, "encoder_config", config), config)
        width = next(getattr(part, name) for part in parts for name in names if hasattr(part, name))
        return [{name: noise(length, width)} for length in (40, 64, 40, 52)]
    raise ValueError(f"the encoder reads {name!r}")


def on_page(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The places of tokens on a page, if the model reads them."""
    if not hasattr(model.config, "max_2d_position_embeddings"):
        return {}
    return {"bbox": torch.rand(*ids.shape, 4, generator=torch.Generator().manual_seed(1))}
