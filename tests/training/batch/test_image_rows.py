"""Samples with images: the largest that training can meet, and samples without images among them."""

import itertools
import re
from functools import partial
from typing import Any

import pytest
import torch
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, padded_collate_sft, padded_collate_tiled_images_and_mask

from tests.support import images
from tests.support.toys import OneOf
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training.batch.image_rows import ImageRows, text_or_images
from torchtune_adaptive.training.batch.row_format import Row, TokenRows

COLLATE: Any = partial(padded_collate_tiled_images_and_mask, padding_idx=0, ignore_idx=CROSS_ENTROPY_IGNORE_IDX)
Rows = list[Row]


class Counting(list[Any]):
    """Remembers which samples were read."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.read: list[Any] = []

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = images.make_assets(tmp_path_factory.mktemp("images") / "assets")
    block = images.config_of("full", directory)["tokenizer"]
    return images.llama3_2_vision_transform(**{key: value for key, value in block.items() if key != "_component_"})


@pytest.fixture(scope="module")
def rows(tokenizer: Any) -> Rows:
    return images.samples(tokenizer, images=(1, 0, 2), count=12)


def format_of(rows: Rows, **known: int) -> ImageRows:
    found = text_or_images(rows, CROSS_ENTROPY_IGNORE_IDX, collate=padded_collate_tiled_images_and_mask, **known)
    assert isinstance(found, ImageRows)
    return found


def shapes(batch: dict[str, Any]) -> tuple[int, ...]:
    """Rows, tokens, images and tiles, of which the mask has to be."""
    num_rows, num_images, num_tiles = batch["encoder_input"]["images"].shape[:3]
    assert batch["encoder_mask"].shape == (*batch["tokens"].shape, num_images * num_tiles * images.TOKENS_PER_TILE)
    assert batch["encoder_input"]["aspect_ratio"].shape == (num_rows, num_images, 2)
    return (*batch["tokens"].shape, num_images, num_tiles)


# ---- the largest row


def worst_case(rows: Rows, consensus: Consensus | None = None, seq_len: int | None = None, **known: int) -> Row:
    lengths: dict[str, Any] = {"seq_len": seq_len, "tokenizer_max_seq_len": None}
    return format_of(rows, **known).worst_case(rows, **lengths, consensus=consensus or Consensus())


def test_no_batch_is_larger_than_one_of_the_largest_row(rows: Rows) -> None:
    rows = [row for row in rows if row["encoder_input"]["images"]]
    worst = shapes(COLLATE([worst_case(rows)] * 2))
    found = [shapes(COLLATE(two)) for two in itertools.combinations(rows, 2)]
    assert worst == tuple(map(max, *found))
    assert len(set(found)) > 3


def test_the_samples_are_read_only_for_what_is_not_known(rows: Rows) -> None:
    counting = Counting(rows)
    row = worst_case(counting, seq_len=50, max_images=3, max_tiles=2)
    assert shapes(COLLATE([row])) == (1, 50, 3, 2)
    assert len(counting.read) == 2  # the first, for the format and for its text
    row = worst_case(counting, seq_len=50, max_tiles=4)
    assert shapes(COLLATE([row])) == (1, 50, 2, 4)
    assert counting.read[2:] == [0, *range(len(rows)), 0]


def test_each_rank_reads_its_share_and_knows_the_largest_of_all(rows: Rows) -> None:
    counting = Counting(rows)
    row = worst_case(counting, OneOf(1, 3, 7), seq_len=50, max_tiles=4)
    assert shapes(COLLATE([row])) == (1, 50, 7, 4)
    assert counting.read == [0, 1, 4, 7, 10, 0]


def test_labels_of_the_largest_row_are_tokens_that_the_model_predicts(rows: Rows) -> None:
    kind, row = format_of(rows), rows[0]
    assert images.VOCABULARY in row["tokens"]  # the image's
    for made in (worst_case(rows), kind.stretched(row, 90), kind.stretched(row | {"labels": [-100]}, 90)):
        assert 0 <= min(made["labels"]) <= max(made["labels"]) < images.VOCABULARY


# ---- other rows


def test_rows_are_stretched_and_shortened_with_their_masks(rows: Rows) -> None:
    kind = format_of(rows)
    for row in rows:
        whole = max(1, len(row["encoder_input"]["images"]))
        assert shapes(COLLATE([kind.stretched(row, 90)]))[:3] == (1, 90, whole)
        assert shapes(COLLATE([kind.shortened(row, 16)])) == (1, 16, 1, 1)
        silent = kind.masked(row)
        assert shapes(COLLATE([silent])) == (1, 16, 1, 1)
        assert set(silent["labels"]) == {CROSS_ENTROPY_IGNORE_IDX}
    assert [[len(row["tokens"]) for row in batch] for batch in kind.small_batches(rows, 4)] == [[16], [24, 24]]


def test_a_sample_without_images_trains_as_without_the_encoder(rows: Rows) -> None:
    """Alone and beside others, with which torchtune fails. Only the other way round does the padding of images show."""
    text, model = rows[1], images.model()
    collate = format_of(rows).collating(COLLATE)
    for beside in ([], [rows[0]], [rows[1]]):
        batch = collate([text, *beside])
        assert batch.pop("labels")[0].tolist()[: len(text["labels"])] == text["labels"]
        with torch.no_grad():
            seen = model(**batch)[0, : len(text["tokens"])]
            alone = model(torch.tensor([text["tokens"]]))[0]
        torch.testing.assert_close(seen, alone, rtol=0, atol=1e-6)
    for torchtunes in ([text], [text, rows[0]]):
        with pytest.raises((ValueError, RuntimeError), match=r"empty|non-empty TensorList"):
            COLLATE(torchtunes)


def test_a_sample_with_an_image_and_no_token_gets_one_that_does_not_count(rows: Rows) -> None:
    kind = format_of(rows)
    masks = [mask[:0] for mask in rows[0]["encoder_mask"]]
    batch = kind.collating(COLLATE)([rows[0] | {"tokens": [], "labels": [], "encoder_mask": masks}])
    assert shapes(batch) == (1, 1, 1, 1)
    assert batch["labels"].tolist() == [[CROSS_ENTROPY_IGNORE_IDX]]


def test_samples_with_images_are_collated_by_torchtune_alone(rows: Rows) -> None:
    with_images = [rows[0], rows[2]]
    ours, torchtunes = format_of(rows).collating(COLLATE)(with_images), COLLATE(with_images)
    torch.testing.assert_close(ours, torchtunes, rtol=0, atol=0)


# ---- which format


def test_texts_have_the_format_of_texts_unless_they_cannot_be_collated(tokenizer: Any) -> None:
    texts = [{"tokens": [1, 2], "labels": [1, 2]}]
    for rows in (texts, images.samples(tokenizer, images=(0,), count=3)):
        assert type(text_or_images(rows, CROSS_ENTROPY_IGNORE_IDX, collate=padded_collate_sft)) is TokenRows
        with pytest.raises(
            InputError,
            match=r"^`collate_fn` fails for a sample without images, which `dataset` has: \w+Error: .+",
        ):
            text_or_images(rows, CROSS_ENTROPY_IGNORE_IDX, collate=padded_collate_tiled_images_and_mask)


@pytest.mark.parametrize(
    ("encoder_input", "named"),
    [({"pixels": []}, "['pixels']"), ({"images": torch.zeros(1)}, "['images']"), (torch.zeros(1), "'Tensor'")],
)
def test_images_in_another_format_are_refused(encoder_input: Any, named: str) -> None:
    row = {"tokens": [1], "labels": [1], "encoder_input": encoder_input}
    sentence = f"`encoder_input` of a sample must be a dict with a list of `images`, but is {named} instead."
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        text_or_images([row], CROSS_ENTROPY_IGNORE_IDX, collate=padded_collate_sft)


def test_an_image_that_cannot_be_read_is_refused_with_its_sample(rows: Rows) -> None:
    class Torn(Counting):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__("torn" if index == 4 else index)

    with pytest.raises(InputError, match=r"^`dataset` cannot load sample 4: TypeError"):
        worst_case(Torn(rows), seq_len=50)
