"""Batches of a trainer are cut by samples, and a trial gets two samples whose labels show how the loss adds up."""

import math
from typing import Any, cast

import pytest
import torch

from torchtune_adaptive import InputError
from torchtune_adaptive.errors import CannotCutError
from torchtune_adaptive.integrations.batches import TrainerBatches
from torchtune_adaptive.integrations.trainer_batch import IGNORED, TrainerBatch


def batch(labels: list[list[int]], divisor: float = 1) -> TrainerBatch:
    ids = torch.arange(len(labels)).reshape(-1, 1)
    return TrainerBatch({"input_ids": ids, "labels": torch.tensor(labels)}, None, divisor)


def tried(*batches: TrainerBatch, pair: tuple[int, int] | None = (0, 1)) -> tuple[list[Any], list[Any]]:
    """The samples of each micro-batch of a trial, and their labels."""
    parts = TrainerBatches(4).trial_batches(batches, pair)[0]
    return [one.inputs["input_ids"].flatten().tolist() for one in parts], [
        one.inputs["labels"].tolist() for one in parts
    ]


def test_losses_of_trials_alone_have_the_weight_of_trials() -> None:
    cutter, samples = TrainerBatches(1), [batch([[3], [4]])]
    cutter.trial_weight = 0.25
    assert {part.weight for parts in cutter.trial_batches(samples) for part in parts} == {0.25}
    assert {part.weight for part in cutter.cut(samples)} == {1.0}


def test_the_parts_of_pairs_stay_together() -> None:
    ids = torch.arange(8).reshape(8, 1)  # chosen 0 to 3, rejected 4 to 7
    pairs = TrainerBatch({"input_ids": ids, "margin": torch.arange(4), "names": list("abcd")}, None, 1)
    parts = TrainerBatches(3, rows_per_sample=2).cut([pairs])
    assert [part.inputs["input_ids"].flatten().tolist() for part in parts] == [[0, 1, 2, 4, 5, 6], [3, 7]]
    assert [part.inputs["margin"].tolist() for part in parts] == [[0, 1, 2], [3]]
    assert [part.inputs["names"] for part in parts] == [["a", "b", "c"], ["d"]]


def test_a_micro_batch_has_at_least_one_sample() -> None:
    with pytest.raises(InputError, match="`micro_batch_size` must be at least 1, but is 0 instead"):
        TrainerBatches(0)


def test_a_batch_with_other_rows_is_refused() -> None:
    odd = TrainerBatch({"input_ids": torch.zeros(4, 2), "pixels": torch.zeros(9, 2)}, None, 1)
    with pytest.raises(InputError, match=r"one row per sample, but has .'input_ids': 4, 'pixels': 9. instead"):
        TrainerBatches(2).cut([odd])
    with pytest.raises(InputError, match=r"^A batch must be a mapping of tensors, but is \['a', 'b'\] instead"):
        TrainerBatches(2).cut([TrainerBatch(cast(Any, ["a", "b"]), None, 1)])


def test_a_list_that_may_be_a_column_or_a_list_of_columns_is_refused_only_if_it_is_cut() -> None:
    """As the objects of each image, if all have as many as there are images."""
    given = TrainerBatch({"pixels": torch.zeros(2, 3), "objects": [torch.zeros(2, 4), torch.zeros(2, 4)]}, None, 1)
    (part,) = TrainerBatches(2).cut([given])
    assert part.inputs is given.inputs
    with pytest.raises(InputError, match="`objects` may be a column or a list of columns"):
        TrainerBatches(1).cut([given])


@pytest.mark.parametrize(("factor", "weights"), [(1.0, [1.0, 1.0]), (0.5, [0.75, 0.25]), (2.0, [4 / 3, 4.0])])
def test_a_part_counts_by_its_share_of_the_batch(factor: float, weights: list[float]) -> None:
    """1.0: of a sum; 0.5: of a mean over samples; 2.0: of a sum that the trainer divides as if it were a mean."""
    batches = TrainerBatches(3)
    batches.scale_by(factor)
    parts = batches.cut([batch([[1], [2], [3], [4]], divisor=2)])
    assert [one.weight for one in parts] == pytest.approx(weights)
    assert [one.divisor for one in parts] == pytest.approx([2 / 0.75, 2 / 0.25])


def test_no_micro_batch_has_rows_of_two_batches() -> None:
    parts = TrainerBatches(2).cut([batch([[1], [2], [3]]), batch([[4]])])
    assert [part.inputs["labels"].flatten().tolist() for part in parts] == [[1, 2], [3], [4]]


def joined(size: int, *batches: TrainerBatch, rows_per_sample: int = 1) -> list[TrainerBatch]:
    cutter = TrainerBatches(size, rows_per_sample=rows_per_sample)
    cutter.joins = True
    return cutter.cut(batches)


def test_whole_batches_of_equally_many_samples_are_joined() -> None:
    pairs, single = [[1], [2]], [[9]]
    parts = joined(5, *(batch(pairs, divisor=4) for _ in range(3)), batch(single, divisor=4))
    assert [part.inputs["labels"].flatten().tolist() for part in parts] == [[1, 2, 1, 2], [1, 2], [9]]
    assert [part.divisor for part in parts] == [2, 4, 4]
    assert [len(part.inputs["labels"]) for part in joined(1, batch(pairs), batch(pairs))] == [1] * 4


def test_rows_of_joined_batches_are_padded_at_their_end() -> None:
    short = {"input_ids": [[5], [6]], "labels": [[5], [6]], "attention_mask": [[1], [1]], "weight": [0.5, 0.6]}
    long = {
        "input_ids": [[7, 8]] * 2,
        "labels": [[IGNORED, 8]] * 2,
        "attention_mask": [[0, 1]] * 2,
        "weight": [0.7, 0.8],
    }
    batches = [
        TrainerBatch({name: torch.tensor(value) for name, value in one.items()}, None, 1) for one in (short, long)
    ]
    cutter = TrainerBatches(4)
    cutter.joins, cutter.pad_token = cutter.can_be_joined(batches), 3
    (part,) = cutter.cut(batches)
    assert {name: one.tolist() for name, one in part.inputs.items() if name != "weight"} == {
        "input_ids": [[5, 3], [6, 3], [7, 8], [7, 8]],
        "labels": [[5, IGNORED], [6, IGNORED], [IGNORED, 8], [IGNORED, 8]],
        "attention_mask": [[1, 0], [1, 0], [0, 1], [0, 1]],
    }
    assert part.inputs["weight"].tolist() == pytest.approx([0.5, 0.6, 0.7, 0.8])
    assert batches[0].inputs["labels"].tolist() == [[5], [6]]


def test_joined_pairs_have_all_first_rows_before_all_second_ones() -> None:
    one, other = (
        TrainerBatch({"input_ids": torch.tensor(ids), "margin": torch.tensor([float(ids[0][0])])}, None, 1)
        for ids in ([[1], [2]], [[3, 3], [4, 4]])
    )
    (part,) = joined(2, one, other, rows_per_sample=2)
    assert part.inputs["input_ids"].tolist() == [[1, 0], [3, 3], [2, 0], [4, 4]]
    assert part.inputs["margin"].tolist() == [1, 3]


@pytest.mark.parametrize(
    "more",
    [
        {"pixel_values": torch.zeros(2, 3)},
        {"names": ["a", "b"]},
        {"inner": {"input_ids": torch.zeros(2, 1)}},
        {"scale": 0.5},  # which may be another one in the next batch
        {"attention_mask": torch.ones(2, 1, 1, 1)},
    ],
)
def test_batches_whose_padding_is_not_known_are_not_joined(more: dict[str, Any]) -> None:
    known = {"input_ids": torch.zeros(2, 1), "attention_mask": torch.ones(2, 1), "index": torch.arange(2)}
    cutter, batches = TrainerBatches(4), [TrainerBatch(known, None, 1)] * 2
    assert cutter.can_be_joined(batches)
    assert not cutter.can_be_joined(batches[:1])
    assert not cutter.can_be_joined([TrainerBatch(known | more, None, 1)] * 2)
    assert not cutter.can_be_joined([TrainerBatch({"input_ids": torch.zeros(2, 1)}, None, 1)] * 2)


def test_a_trial_of_joined_batches_takes_samples_of_two_that_are_padded_to_other_lengths() -> None:
    ignored = IGNORED
    whole = batch([[1, 2, 3], [1, ignored, ignored]])
    as_long, shorter = batch([[4, 5, ignored]]), batch([[6, 7]])
    cutter = TrainerBatches(4)
    cutter.joins = True
    one, other, both = cutter.trial_batches([whole, as_long, shorter])[0]
    assert [part.inputs["labels"].tolist() for part in (one, other)] == [[[1, 2, 3]], [[ignored, 7]]]
    assert both.inputs["labels"].tolist() == [[1, 2, 3], [ignored, 7, ignored]]


def of_columns(**values: Any) -> TrainerBatch:
    return TrainerBatch({name: torch.tensor(value) for name, value in values.items()}, None, 1)


def test_batches_of_different_columns_are_not_joined() -> None:
    common: dict[str, Any] = {"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}
    cutter, first = TrainerBatches(4), of_columns(**common, token_type_ids=[[0, 0]])
    assert cutter.can_be_joined([first, first])
    assert not cutter.can_be_joined([first, of_columns(**common)])
    assert not cutter.can_be_joined([of_columns(**common), first])
    assert not cutter.can_be_joined([first, of_columns(**common, token_type_ids=[[0.0, 0.0]])])


@pytest.mark.parametrize(
    ("labels", "known", "can"),
    [
        ([[5, 6, IGNORED], [5, 6, 7]], False, True),
        ([[5, 6, 0], [5, 6, 7]], True, False),  # its loss may ignore 0, and have no class of -100
        ([[5, 6, 7], [5, 6, 7]], False, False),  # there may be no label of -100
        ([[5, 6, 7], [5, 6, 7]], True, True),
        ([[IGNORED, 6, 7], [5, 6, 7]], False, True),
    ],
)
def test_batches_of_several_lengths_are_joined_only_if_labels_of_padding_are_known(
    labels: list[list[int]], known: bool, can: bool
) -> None:
    masks = [[1, 1, int(labels[0][2] in (6, 7))], [1, 1, 1]]
    long = of_columns(input_ids=labels, attention_mask=masks, labels=labels)
    short = of_columns(input_ids=[[5, 6]] * 2, attention_mask=[[1, 1]] * 2, labels=[[5, 6]] * 2)
    cutter = TrainerBatches(4)
    cutter.ignores_labels = known
    assert cutter.can_be_joined([long, short]) is cutter.can_be_joined([short, long]) is can
    assert cutter.can_be_joined([long, long])


@pytest.mark.parametrize("is_left", [False, True])
def test_a_trial_of_joined_batches_pads_one_of_two_samples_if_all_batches_are_equally_long(is_left: bool) -> None:
    full, short = [1, 1, 1, 1], [0, 0, 1, 1] if is_left else [1, 1, 0, 0]
    batches = [
        of_columns(input_ids=[full], attention_mask=[full]),
        of_columns(input_ids=[short], attention_mask=[short]),
    ]
    cutter = TrainerBatches(4)
    cutter.joins = True
    others = [batches[0], of_columns(input_ids=[[1] * 5], attention_mask=[[1] * 5])]
    assert cutter.lacks_padding(others)
    assert not cutter.lacks_padding(batches)
    one, other, both = cutter.trial_batches(batches)[0]
    assert [part.inputs["attention_mask"].tolist() for part in (one, other)] == [[full], [[1, 1]]]
    assert both.inputs["attention_mask"].tolist() == [full, [1, 1, 0, 0]]
    assert cutter.lacks_padding(others)
    cutter.scale_by(1.0)
    assert not cutter.lacks_padding(others)


def test_a_trial_of_rows_without_padding_has_not_seen_what_padding_does() -> None:
    equal, longer = (of_columns(input_ids=[[1] * size], attention_mask=[[1] * size]) for size in (4, 5))
    cutter = TrainerBatches(4)
    cutter.joins = True
    for second in (equal, longer):
        cutter.trial_batches([equal, second])
        cutter.scale_by(1.0)
        assert cutter.lacks_padding([equal, longer])
    cutter.joins = False
    assert not cutter.lacks_padding([equal, longer])


def weighted(inputs: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(inputs["logits"], inputs["labels"], weight=torch.tensor([1.0, 1.0, 9.0]))


def over_those_that_count(inputs: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(inputs["logits"], inputs["labels"])


def over_samples(inputs: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(inputs["logits"], inputs["labels"], reduction="none").mean()


def over_tokens(inputs: Any) -> torch.Tensor:
    valid = inputs["labels"] != IGNORED
    return (inputs["labels"] * valid).sum() / valid.sum()


def masked(inputs: Any) -> torch.Tensor:
    return (inputs["input_ids"] * inputs["loss_mask"]).sum() / inputs["loss_mask"].sum()


def sample_weights(inputs: Any) -> torch.Tensor:
    return (inputs["labels"] * inputs["weight"]).sum() / inputs["weight"].sum()


def not_missing(inputs: Any) -> torch.Tensor:
    return inputs["labels"].nan_to_num().sum() / (~inputs["labels"].isnan()).sum()


def of_a_class(inputs: Any) -> torch.Tensor:
    return (inputs["labels"] * (inputs["labels"] != 255)).sum() / (inputs["labels"] != 255).sum()


def tagged(inputs: Any) -> torch.Tensor:
    return (inputs["tags"] * (inputs["tags"] != IGNORED)).sum() / (inputs["tags"] != IGNORED).sum()


def of_task(inputs: Any) -> torch.Tensor:
    valid = inputs["labels_a"] != IGNORED
    return (inputs["labels_a"] * valid).sum() / valid.sum().clamp(min=1) + inputs["labels_b"].float().mean()


def of_pixels(inputs: Any) -> torch.Tensor:
    return (inputs["labels"] * inputs["weight_map"]).sum() / inputs["weight_map"].sum()


def of_logits(*labels: int) -> dict[str, Any]:
    return {
        "logits": torch.randn(len(labels), 3, generator=torch.Generator().manual_seed(0)).tolist(),
        "labels": labels,
    }


@pytest.mark.parametrize(
    ("loss", "values", "is_mean"),
    [
        (over_samples, of_logits(0, 0, 1, 2), True),
        (over_samples, of_logits(0, 1, IGNORED, 1), True),
        (weighted, of_logits(0, 0, 0, 2), False),
        (over_those_that_count, of_logits(0, 1, IGNORED, 1), False),
        (over_tokens, {"labels": [[1, 2, 3], [3, 4, 8], [9, IGNORED, IGNORED]]}, False),
        (over_tokens, {"labels": [[1, 2, 3, IGNORED], [3, 4, 8, IGNORED]]}, False),
        (masked, {"input_ids": [[1, 2], [4, 5], [7, 9]], "loss_mask": [[1, 1], [1, 1], [0, 1]]}, False),
        (sample_weights, {"labels": [1.0, 2.0, 5.0], "weight": [1.0, 1.0, 7.0]}, False),
        (not_missing, {"labels": [[1.0, 2.0], [4.0, 1.0], [9.0, math.nan]]}, False),
        (of_a_class, {"labels": [[[1, 2]], [[4, 1]], [[9, 255]]]}, False),
        (tagged, {"tags": [[1, 2], [4, 1], [9, IGNORED]]}, False),
        (of_task, {"labels_a": [1, 2, 3, IGNORED], "labels_b": [4, 5, 6, 7]}, False),
        (of_pixels, {"labels": [[[1, 2]], [[4, 1]], [[9, 9]]], "weight_map": [[[1, 1]], [[1, 1]], [[9, 3]]]}, False),
    ],
)
def test_a_mean_with_other_weights_than_samples_does_not_look_like_one_over_samples(
    loss: Any, values: dict[str, Any], is_mean: bool
) -> None:
    one, other, both = (
        loss(part.inputs) / part.divisor for part in TrainerBatches(4).trial_batches([of_columns(**values)])[0]
    )
    assert any(torch.allclose(both, factor * (one + other), rtol=0.02) for factor in (0.5, 1.0, 2.0)) is is_mean


def objects(*numbers: int) -> TrainerBatch:
    """Images with so many objects."""
    labels = [{"boxes": torch.ones(number, 4), "class_labels": torch.ones(number)} for number in numbers]
    return TrainerBatch({"pixels": torch.ones(len(numbers), 3, 2, 2), "labels": labels}, None, 1)


def test_a_loss_may_weigh_samples_by_their_objects() -> None:
    cutter = TrainerBatches(2)
    cutter.trial_batches([objects(1, 1, 1)])
    cutter.scale_by(0.5)
    assert not cutter.tells_more([objects(1, 1)])
    assert cutter.tells_more([objects(1, 3)])
    one, other, both = cutter.trial_batches([objects(2, 2, 5, 1)])[0]
    found = [[len(image["boxes"]) for image in part.inputs["labels"]] for part in (one, other, both)]
    assert found == [[5], [1], [5, 1]]


@pytest.mark.parametrize("row", [2, 5])
def test_each_part_of_a_pair_may_weigh_it(row: int) -> None:
    masks = [[int(number != row), 1] for number in range(6)]  # of three pairs, of which the last one has an own mask
    batch = of_columns(input_ids=[[1], [2], [3], [4], [5], [6]], loss_mask=masks)
    parts = TrainerBatches(4, rows_per_sample=2).trial_batches([batch])[0]
    assert [part.inputs["input_ids"].flatten().tolist() for part in parts] == [[1, 4], [3, 6], [1, 3, 4, 6]]


def test_a_trial_takes_samples_of_the_batch_in_which_they_differ_the_most() -> None:
    equal, unequal = (of_columns(index=[[0]] * 3, labels=labels) for labels in ([1, 1, 1], [2, 3, 3]))
    one, other, _ = TrainerBatches(4).trial_batches([equal, unequal])[0]
    assert [part.inputs["labels"].tolist() for part in (one, other)] == [[3], [2]]


@pytest.mark.parametrize("joins", [False, True])
def test_a_trial_may_take_groups_of_samples(joins: bool) -> None:
    first, second = (of_columns(input_ids=[[number + 1] for number in rows]) for rows in (range(3), range(3, 6)))
    cutter = TrainerBatches(4)
    cutter.joins = joins
    (one, other, both), alone = cutter.trial_batches([first, second], group=2)
    found = [part.inputs["input_ids"].flatten().tolist() for part in (one, other, both, *alone)]
    assert found == [[1, 2], [3, 4 if joins else 1], [1, 2, 3, 4 if joins else 1], [1], [2]]


def test_samples_that_differ_in_what_no_trial_has_seen_tell_more() -> None:
    def masks(*lengths: int, first: tuple[int, ...] = (1,)) -> TrainerBatch:
        rows = [[int(place < length) for place in range(40)] for length in lengths]
        return of_columns(input_ids=rows, loss_mask=rows, labels=[*first, *(1 for _ in lengths[1:])])

    cutter = TrainerBatches(2)
    assert not cutter.tells_more([masks(20, 20), masks(40, 40)])  # rows of two batches do not meet
    for lengths in ((20, 20, 22), (20, 26), (20, 40)):
        assert cutter.tells_more([masks(20, 20), masks(*lengths)])
        cutter.trial_batches([masks(20, 20), masks(*lengths)])
        assert cutter.tells_more([masks(*lengths)])  # there was no verdict
        cutter.trial_batches([masks(*lengths)])
        cutter.scale_by(1.0)
        assert not cutter.tells_more([masks(*lengths)])
    assert not cutter.tells_more([masks(1, 40)])
    assert cutter.tells_more([masks(20, 20, first=(0,))])
    cutter.forget_trials()
    assert cutter.tells_more([masks(20, 22)])


def test_a_trial_has_told_more_if_its_samples_differ_more() -> None:
    """The longest and the shortest row are of one batch; the trial of joined batches takes rows of two."""
    rows = [[int(place < length) for place in range(8)] for length in (8, 3, 7)]
    samples = [of_columns(input_ids=one, attention_mask=one) for one in (rows[:2], rows[2:])]
    cutter = TrainerBatches(3)
    cutter.joins = True
    found = []
    for _ in range(2):
        cutter.trial_batches(samples)
        assert not cutter.trial_samples.has_told_more
        cutter.scale_by(1.0)
        found.append(cutter.trial_samples.has_told_more)
    assert found == [True, False]
    assert cutter.tells_more(samples)


def test_a_trial_of_joined_batches_takes_the_longest_row_and_the_shortest_of_another_batch() -> None:
    """Although another row of that batch has a weight further apart."""
    rows = [[int(place < length) for place in range(8)] for length in (6, 5, 8, 7, 3, 8)]
    cutter = TrainerBatches(6)
    cutter.joins = True
    pairs = [rows[at : at + 2] for at in (0, 2, 4)]
    samples = [of_columns(input_ids=pair, attention_mask=pair, weight=[1.0, 9.0]) for pair in pairs]
    one, other, _ = cutter.trial_batches(samples)[0]
    assert [int(part.inputs["attention_mask"].sum()) for part in (one, other)] == [8, 3]


def test_losses_are_not_scaled_by_two_factors() -> None:
    cutter = TrainerBatches(2)
    cutter.trial_batches([of_columns(labels_a=[1, 1])])
    assert not cutter.scale_by(0.5)
    assert cutter.tells_more([of_columns(labels_a=[1, 2])])  # another class may have another weight
    assert "otherwise than others" in cutter.scale_by(1.0)
    assert not cutter.scale_by(0.5)
    cutter.forget_trials()
    assert not cutter.scale_by(1.0)


def test_a_trial_that_finds_nothing_leaves_the_factor() -> None:
    cutter, samples = TrainerBatches(3), [batch([[1], [2], [3], [4]])]
    cutter.scale_by(0.5)
    assert [one.weight for one in cutter.trial_batches(samples)[0]] == [1.0] * 3
    assert [one.weight for one in cutter.cut(samples)] == pytest.approx([0.75, 0.25])


def test_batches_that_must_stay_whole_are_not_tried() -> None:
    cutter = TrainerBatches(3)
    cutter.why_whole = "a reason"
    with pytest.raises(CannotCutError, match="must not be cut into micro-batches: a reason"):
        cutter.trial_batches([batch([[1], [2]])])


@pytest.mark.parametrize(("pair", "expected"), [((0, 1), [[1], [3], [1, 3]]), ((2, 3), [[0], [2], [0, 2]])])
def test_samples_with_the_most_and_the_fewest_labels_are_tried_first(pair: Any, expected: list[list[int]]) -> None:
    ignored = IGNORED
    small = batch([[7, 7, 7]])
    large = batch([[1, 2, ignored], [1, 2, 3], [ignored] * 3, [1, ignored, ignored]])
    assert tried(small, large, pair=pair)[0] == expected


def test_a_sample_whose_answer_is_outside_of_its_row_comes_with_the_second_one() -> None:
    """Losses of answers are means over the samples whose answers are within their rows, of two tokens here."""
    ids = torch.arange(8).reshape(4, 2)
    found = []
    for ends in ([0, 1, 0, 1], [0, 2, 0, 1]):
        inputs = {"input_ids": ids, "start_positions": torch.zeros(4, dtype=torch.long)}
        given = TrainerBatch({**inputs, "end_positions": torch.tensor(ends)}, None, 1)
        cutter = TrainerBatches(4)
        parts = cutter.trial_batches([given])[0]
        found.append([one.inputs["end_positions"].tolist() for one in parts])
        cutter.scale_by(1.0)
        later = TrainerBatch({**inputs, "end_positions": torch.tensor([0, 5, 1, 1])}, None, 1)
        assert cutter.tells_more([later]) is (max(ends) < 2)
    (one, other, _), (twice, with_ignored, both) = found
    assert (len(one), len(other)) == (1, 1)
    assert len(twice) == 2
    assert twice[0] == twice[1] < 2
    assert with_ignored[1] == 2
    assert both == [*twice, *with_ignored]


def test_of_samples_with_equally_many_labels_one_loses_half_if_labels_are_ignored_anywhere() -> None:
    """Or a mean over labels would look like one over samples."""
    ignored = IGNORED
    one, other = [1, 2, 3, 4, ignored], [ignored, 5, 6, 7, 8]
    halved = [ignored, ignored, ignored, 7, 8]
    given = batch([one, other])
    assert tried(given) == ([[0], [1], [0, 1]], [[one], [halved], [one, halved]])
    assert given.inputs["labels"].tolist() == [one, other]
    assert tried(batch([[1, 2], [3, 4]]))[1] == [[[1, 2]], [[3, 4]], [[1, 2], [3, 4]]]


def test_without_two_samples_a_trial_has_the_one_there_is() -> None:
    assert tried(batch([[1], [2]]), pair=None)[0] == [[0], [1]]
    assert tried(batch([[1]]))[0] == [[0], [0], [0, 0]]
    assert TrainerBatches(4).trial_batches([]) == []
    assert [TrainerBatches(4).num_to_try(batches) for batches in ([], [batch([[1], [2]]), batch([[1]])])] == [0, 2]
