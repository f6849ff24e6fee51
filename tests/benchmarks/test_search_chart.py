"""The README's chart shows the measured table."""

from benchmarks.search import CPU
from benchmarks.search_chart import PICTURE, Row, description_of, rows_of


def test_the_committed_chart_shows_the_committed_results() -> None:
    assert description_of(rows_of(CPU.results.read_text())) in PICTURE.read_text()


def test_a_row_has_the_size_the_errors_the_seconds_and_whether_training_survives() -> None:
    document = f"""
## {CPU.cases[0].name}
| toma.batch from 512 | 16 | 26 | 0 | 5 | 1.54 [1.53, 1.56] | 0.93 | torch RNG | yes |

## {CPU.cases[-1].name}, limit 256MiB
| ours (defaults) | 23 | 24 | 4 | 0 | 0.78 [0.73, 0.83] | 0.15 | nothing | yes |
| exhaustive | 24 | 24 | 4 | 0 | 0.78 [0.73, 0.83] | 0.15 | nothing | yes |
| toma.batch from 512 | 32 | 24 | 15 | 1 | 3.94 [3.88, 4.00] | 1.46 | torch RNG | OOM at step 7 |

## What was chosen
"""
    assert rows_of(document) == [
        Row("torchtune_adaptive", 23, 24, 0, 0.78, survives=True),
        Row("toma", 32, 24, 1, 3.94, survives=False),
    ]
