"""The size chosen by speed is as good as the best, and none below it is."""

from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_adaptive.search.throughput import smallest_near_best

rates_of_sizes = st.dictionaries(st.integers(1, 64), st.floats(900, 1100), min_size=1, max_size=8)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(rates=rates_of_sizes)
def test_the_size_chosen_is_within_two_percent_of_the_best_and_no_smaller_one_is(rates: dict[int, float]) -> None:
    chosen = smallest_near_best(rates)
    best = max(rates.values())
    assert rates[chosen] >= 0.98 * best
    assert [size for size in rates if size < chosen and rates[size] >= 0.98 * best] == []
