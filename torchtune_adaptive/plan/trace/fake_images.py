"""Images of a planned step: batches of them without content, for models of texts and images."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torchtune.modules.model_fusion import DeepFusionModel, FusionEmbedding
from torchtune.modules.vision_transformer import VisionTransformer

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.trace.fake_step import FakeStep
from torchtune_adaptive.plan.trace.keys import max_images


@dataclass(frozen=True)
class FakeImages:
    """The images of each row.

    Attributes:
        images: images of a row.
        tiles: tiles of an image.
        shape: of a tile: channels, height and width.
        tokens: of the encoder for a tile.
        dtype: that of the encoder, or torchtune could not train it.
        token: the token that stands for an image.
    """

    images: int
    tiles: int
    shape: tuple[int, int, int]
    tokens: int
    dtype: torch.dtype
    token: int

    def batch(self, rows: int, length: int, *, mode: FakeStep) -> dict[str, Any]:
        """What a batch of ``rows`` rows of ``length`` tokens has beside its labels. Call it in ``mode``."""
        with _disable_current_modes():
            tokens = torch.zeros(rows, length, dtype=torch.long)
            tokens[:, : self.images] = self.token
            aspect_ratio = torch.tensor([self.tiles, 1]).expand(rows, self.images, 2).contiguous()
        pixels = torch.zeros(rows, self.images, self.tiles, *self.shape, dtype=self.dtype)
        return {
            "tokens": mode.known(tokens),
            "encoder_input": {"images": pixels, "aspect_ratio": mode.known(aspect_ratio)},
            "encoder_mask": torch.zeros(rows, length, self.images * self.tiles * self.tokens, dtype=torch.bool),
        }


def images_of(model: nn.Module, cfg: Mapping[str, Any]) -> FakeImages | None:
    """The largest images that ``model`` takes, as many as ``adaptive.max_images`` says; None for a text model.

    Raises:
        InputError: the encoder of the images is none of torchtune's.
    """
    if not isinstance(model, DeepFusionModel):
        return None
    encoder = next((part for part in model.encoder.modules() if isinstance(part, VisionTransformer)), None)
    if encoder is None:
        kind = type(model.encoder).__name__
        raise InputError(f"`model` must have a VisionTransformer as its encoder in a plan, but has a {kind} instead.")
    per_tile: Any = encoder.patches_per_tile
    side = math.isqrt(per_tile) * encoder.conv.kernel_size[0]
    embedding: Any = encoder.pre_tile_pos_embed
    tiles = 1 if embedding is None else embedding.embedding.shape[0]
    shape = (encoder.conv.in_channels, side, side)
    embedding = model.decoder.tok_embeddings
    token = embedding.embedding.num_embeddings if isinstance(embedding, FusionEmbedding) else 0
    dtype = encoder.conv.weight.dtype
    return FakeImages(max_images(cfg), tiles, shape, tokens=per_tile + 1, dtype=dtype, token=token)
