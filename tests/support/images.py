"""A small Llama 3.2 Vision with its tokenizer and data, of torchtune's own parts, for configs of tests."""

import base64
import json
import random
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from PIL import Image
from torch import nn
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Message

# The package index has torchvision for CUDA. Beside a torch without CUDA it lacks its operators, and can be imported
# only if somebody defines them. torchtune uses none. transformers would fail, so the Makefile puts it aside.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
if not torch.version.cuda:
    for _name in ("nms", "qnms"):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
with mock.patch.object(sys, "path", [*sys.path, str(Path(sys.prefix) / "torchvision")]):
    from torchtune.models.llama3_2_vision import (
        _component_builders as builders,  # called by module, so that a plan can replace them
    )
    from torchtune.models.llama3_2_vision import llama3_2_vision_transform  # noqa: F401  # for configs
    from torchtune.modules.model_fusion import DeepFusionModel

BYTES, TILE, PATCH, MAX_TILES = 256, 28, 14, 4  # torchtune's tokenizer has this patch
TOKENS_PER_TILE = (TILE // PATCH) ** 2 + 1
_SPECIAL = ("begin_of_text", "end_of_text", "finetune_right_pad_id", "step_id", "start_header_id", "end_header_id")
_SPECIAL += ("eom_id", "eot_id", "python_tag", "image")  # the image's comes last, as in torchtune
VOCABULARY = BYTES + len(_SPECIAL) - 1  # without the image's
_ENCODER: dict[str, Any] = {"patch_size": PATCH, "tile_size": TILE, "max_num_tiles": MAX_TILES, "num_heads": 2}
_ENCODER |= {"clip_num_layers": 2, "clip_hidden_states": [0], "num_layers_projection": 1}
_DECODER: dict[str, Any] = {"vocab_size": VOCABULARY, "num_special_tokens": 8, "num_heads": 4, "num_kv_heads": 2}
_DECODER |= {"fusion_interval": 2, "max_seq_len": 256, "encoder_max_seq_len": 1024}
_LORA = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True, "lora_rank": 4, "lora_alpha": 8}
WIDE = 512  # wide enough for NF4 on two ranks
_ALL_TRAINED: dict[str, Any] = {"decoder_trainable": True, "encoder_trainable": True}
MODEL_NAME, WIDE_NAME = "model.pt", "wide.pt"


def model(num_layers: int = 2, attn_dropout: float = 0.0, width: int = 64, **trainable: Any) -> DeepFusionModel:
    """All parts are trained, or those that ``trainable`` says, by torchtune's names."""
    encoder, decoder = _sizes(num_layers, width)
    parts: dict[str, Any] = {
        "encoder": builders.llama3_2_vision_encoder(**encoder),
        "decoder": builders.llama3_2_vision_decoder(**decoder),
    }
    return _opened(DeepFusionModel(**parts, **_ALL_TRAINED | trainable))


def lora_model(num_layers: int = 2, width: int = 64, **lora: Any) -> DeepFusionModel:
    """As in the stock configs, adapters are trained in the encoder and in the fusion layers."""
    encoder, decoder = _sizes(num_layers, width)
    parts = {
        "encoder": builders.lora_llama3_2_vision_encoder(True, True, **lora, **encoder),
        "decoder": builders.lora_llama3_2_vision_decoder(False, True, **lora, **decoder),
    }
    return _opened(DeepFusionModel(**parts, encoder_trainable=True))


def samples(
    tokenizer: Any,
    *,
    images: Sequence[int] = (1, 2, 1, 1),
    count: int = 16,
    packed: bool = False,
    dtype: str = "float32",
) -> list[dict[str, Any]]:
    """Questions about coloured rectangles, with numbers of images that repeat ``images``.

    Images are in ``dtype``, which must be the model's: torchtune makes them in bfloat16 for any model.
    """
    assert not packed
    draw = random.Random(0)
    rows = []
    for index in range(count):
        number = images[index % len(images)]
        pictures = [
            _picture(draw.randrange(14, 70), draw.randrange(14, 70), draw.randrange(256)) for _ in range(number)
        ]
        question = [{"type": "image", "content": picture} for picture in pictures]
        question.append({"type": "text", "content": "What? " * draw.randrange(1, 4)})
        answer = "It is red. " * draw.randrange(1, 6)
        messages = [Message("user", question, masked=True), Message("assistant", answer)]
        row = tokenizer({"messages": messages})
        row["encoder_input"]["images"] = [image.to(getattr(torch, dtype)) for image in row["encoder_input"]["images"]]
        labels = [
            CROSS_ENTROPY_IGNORE_IDX if masked else token
            for token, masked in zip(row["tokens"], row["mask"], strict=True)
        ]
        rows.append(row | {"labels": labels})
    return rows


def make_assets(directory: Path) -> Path:
    """Write the tokenizer's files and the models' weights to ``directory``."""
    directory.mkdir(parents=True)
    lines = (f"{base64.b64encode(bytes([one])).decode()} {one}" for one in range(BYTES))
    (directory / "tokenizer.model").write_text("\n".join(lines))
    added = [{"content": f"<|{name}|>", "id": BYTES + place} for place, name in enumerate(_SPECIAL)]
    (directory / "special.json").write_text(json.dumps({"added_tokens": added}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, width in ((MODEL_NAME, 64), (WIDE_NAME, WIDE)):
            torch.save(model(width=width).state_dict(), directory / name)
    return directory


def config_of(kind: str, directory: Path) -> dict[str, Any]:
    """Overrides of the tiny config of ``kind``, for the assets in ``directory``."""
    here = __name__
    return {
        "tokenizer": {
            "_component_": f"{here}.llama3_2_vision_transform",
            "path": str(directory / "tokenizer.model"),
            "special_tokens_path": str(directory / "special.json"),
            "image_size": TILE,
            "max_seq_len": 64,
        },
        "model": {"_component_": f"{here}.lora_model"} | _LORA if "lora" in kind else {"_component_": f"{here}.model"},
        "dataset": {"_component_": f"{here}.samples"},
        "collate_fn": "torchtune.data.padded_collate_tiled_images_and_mask",
        "checkpointer__checkpoint_dir": str(directory),
        "checkpointer__checkpoint_files": [MODEL_NAME],
        "checkpointer__model_type": "LLAMA3_VISION",
    }


def _sizes(num_layers: int, width: int) -> tuple[dict[str, Any], dict[str, Any]]:
    encoder = _ENCODER | {"clip_embed_dim": width // 2, "decoder_embed_dim": width}
    return encoder, _DECODER | {"num_layers": num_layers, "embed_dim": width, "intermediate_dim": 2 * width}


@cache
def _picture(width: int, height: int, shade: int) -> Image.Image:
    return Image.new("RGB", (width, height), (shade, 255 - shade, 128))


def _opened(model: DeepFusionModel) -> DeepFusionModel:
    """Images take part only where these gates are not 0, which they are at first."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name in ("scale", "gate"):
                nn.init.constant_(parameter, 0.5)
    return model
