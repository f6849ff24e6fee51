"""The format of samples with images, as torchtune's transforms for Llama 3.2 Vision make them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchtune import utils

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.progress import Bar
from torchtune_adaptive.errors import InputError, quote, reason_of
from torchtune_adaptive.training.batch.row_format import Row, TokenRows, load_sample, repeated

log = utils.get_logger("DEBUG")


@dataclass(frozen=True)
class Tile:
    """What all tiles of a data set have in common.

    Attributes:
        empty: one tile of zeros [1, channels, height, width].
        tokens: tokens of the encoder for one tile.
    """

    empty: torch.Tensor
    tokens: int

    def images(self, *, length: int, images: int, tiles: int, seen: bool) -> Row:
        """Parts of a sample: ``images`` images of ``tiles`` empty tiles, and which of ``length`` tokens see them."""
        return {
            "encoder_input": {
                "images": [self.empty.expand(tiles, *self.empty.shape[1:])] * images,
                "aspect_ratio": [torch.tensor([tiles, 1])] * images,  # its position embeddings take the most memory
            },
            "encoder_mask": [torch.full((length, tiles * self.tokens), seen)] * images,
        }


class ImageRows(TokenRows):
    """Rows of ``tokens`` and ``labels`` with any number of images.

    ``torchtune.data.padded_collate_tiled_images_and_mask`` pads a micro-batch to its most tokens, most images of a
    sample and most tiles of an image, so memory follows all three. It fails for a sample without images. Here such a
    sample gets an empty tile that none of its tokens sees. So every rank runs the image encoder in every micro-step,
    and its collectives do not depend on the samples.

    Args:
        max_images: the most images of a sample; None: read the samples.
        max_tiles: the most tiles of an image; None: read the samples.
    """

    keys = ("tokens", "labels", "encoder_input", "encoder_mask")
    memory_follows_tokens = False

    def __init__(self, ignore_index: int, tile: Tile, *, max_images: int | None, max_tiles: int | None) -> None:
        super().__init__(ignore_index)
        self._tile = tile
        self._max_images = max_images
        self._max_tiles = max_tiles

    def stretched(self, row: Row, length: int) -> Row:
        row = self._with_images(row)
        masks = [mask.new_ones(length, mask.shape[1]) for mask in row["encoder_mask"]]
        return self._text(row, length) | {"encoder_input": row["encoder_input"], "encoder_mask": masks}

    def shortened(self, row: Row, length: int) -> Row:
        """The sample truncated to ``length`` tokens, with one empty tile."""
        tokens, labels = row["tokens"][:length], row["labels"][:length]
        images = self._tile.images(length=len(tokens), images=1, tiles=1, seen=True)
        return {"tokens": tokens, "labels": labels} | images

    def worst_case(
        self, dataset: Any, *, seq_len: int | None, tokenizer_max_seq_len: int | None, consensus: Consensus
    ) -> Row:
        known = (seq_len or tokenizer_max_seq_len, self._max_images, self._max_tiles)
        own = self._largest(dataset, consensus) if None in known else (0, 0, 0)
        tokens, images, tiles = (
            consensus.max_over_ranks(found) if given is None else given for given, found in zip(known, own, strict=True)
        )
        utils.log_rank_zero(log, f"Rows of probes have {tokens} tokens and {images} images of {tiles} tiles.")
        parts = self._tile.images(length=tokens, images=images, tiles=tiles, seen=True)
        return self._text(dataset[0], tokens) | parts

    def collating(self, collate: Callable[[Sequence[Row]], Any]) -> Callable[[Sequence[Row]], Any]:
        return super().collating(lambda rows: collate([self._with_images(row) for row in rows]))

    def _text(self, row: Row, length: int) -> Row:
        """The sample's text repeated or truncated. The model cannot predict an image's token, so it is no label."""
        targets = [label for label in row["labels"] if label != self._ignore_index]
        return {"tokens": repeated(row["tokens"], length), "labels": repeated(targets or [0], length)}

    def _with_images(self, row: Row) -> Row:
        if _images(row):
            return row
        return row | self._tile.images(length=len(row["tokens"]), images=1, tiles=1, seen=False)

    def _largest(self, dataset: Any, consensus: Consensus) -> tuple[int, ...]:
        """The most tokens, images and tiles in this rank's share of the samples; at least one each."""
        largest = (1, 1, 1)
        for _, row in self._share(dataset, consensus, task="finding the largest sample"):
            tiles = max((len(image) for image in _images(row)), default=1)
            largest = tuple(map(max, largest, (self.num_tokens(row), len(_images(row)), tiles)))
        return largest


def text_or_images(
    dataset: Any,
    ignore_index: int,
    *,
    collate: Callable[..., Any],
    max_images: int | None = None,
    max_tiles: int | None = None,
) -> TokenRows:
    """The format of the samples of ``dataset``: texts, or texts of which at least one has an image.

    Raises:
        InputError: a sample cannot be loaded, or has images in an unknown format, or none has an image, without which
            ``collate`` fails.
    """
    row: Row | None = None
    for index in Bar(range(len(dataset)), desc="finding a sample with an image", leave=False, delay=1):
        row = load_sample(dataset, index)
        if "encoder_input" not in row:
            break
        if images := _images(row):
            tile = Tile(torch.zeros_like(images[0][:1]), row["encoder_mask"][0].shape[1] // len(images[0]))
            return ImageRows(ignore_index, tile, max_images=max_images, max_tiles=max_tiles)
    if row is not None:
        try:
            collate([row])
        except Exception as error:
            raise InputError(
                f"`collate_fn` fails for a sample without images, which `dataset` has: {reason_of(error)}."
            ) from error
    return TokenRows(ignore_index)


def _images(row: Row) -> list[torch.Tensor]:
    """The images of a sample, each as its tiles [tiles, channels, height, width]."""
    encoder_input = row["encoder_input"]
    images = encoder_input.get("images") if isinstance(encoder_input, dict) else None
    if not isinstance(images, list):
        names = list(encoder_input) if isinstance(encoder_input, dict) else type(encoder_input).__name__
        raise InputError(
            f"`encoder_input` of a sample must be a dict with a list of `images`, but is {quote(names)} instead."
        )
    return images
