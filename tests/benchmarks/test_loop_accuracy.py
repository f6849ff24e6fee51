"""The loops that ``benchmarks/loop_accuracy.py`` draws, without running them."""

import pickle

from benchmarks.loop_accuracy import CHECKPOINTING, FAMILIES, PRECISIONS, draw_cases


def test_a_seed_gives_the_same_cases_and_more_cases_begin_with_the_same():
    assert draw_cases(3, 12)[:5] == draw_cases(3, 5)
    assert draw_cases(3, 5) != draw_cases(4, 5)


def test_ten_cases_have_every_family_every_precision_and_every_kind_of_checkpointing():
    cases = draw_cases(0, 10)
    assert {case.family for case in cases} == set(FAMILIES)
    assert {case.precision for case in cases} == set(PRECISIONS)
    assert {case.checkpointing for case in cases} == set(CHECKPOINTING)
    assert {case.ranks for case in cases} == {1, 2}
    assert {case.lora for case in cases} == {True, False}
    assert {case.tied for case in cases} == {True, False}
    assert len({case.name for case in cases}) == 10


def test_cases_go_to_other_processes():
    cases = draw_cases(0, 3)
    assert pickle.loads(pickle.dumps(cases)) == cases
