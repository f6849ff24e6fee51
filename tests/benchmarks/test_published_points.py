"""Published peaks of GPU memory: every point has its quantity, its source and a config that can be planned."""

import re

import pytest

from benchmarks.published_points import GIB, Point, read_points
from torchtune_adaptive.stock.configs import load_config, method_of

UNITS = {"GiB": GIB, "GB": 10**9, "MiB": 2**20, "bytes": 1}
POINTS = read_points()


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_a_point_has_its_source_and_the_figure_is_in_the_quotation(point: Point) -> None:
    assert re.match(r"https://[\w.-]+/\S+$", point.source)
    figure = f"{point.bytes / UNITS[point.unit]:.14g}"
    assert any(float(number) == pytest.approx(float(figure)) for number in re.findall(r"\d+(?:\.\d+)?", point.quote))
    assert point.quantity in ("allocated", "active", "reserved", "nvidia-smi")
    assert all([point.name, point.group, point.gpu, point.nproc_per_node > 0])


def test_a_well_specified_point_has_all_that_a_plan_needs() -> None:
    for point in POINTS:
        assert (point.seq_len is None) <= (point.missing is not None), point.name
        if point.well_specified:
            assert point.missing is None, point.name
            assert {"dataset.packed=True", f"tokenizer.max_seq_len={point.seq_len}"} <= set(point.config["overrides"])


@pytest.mark.parametrize("run", sorted({point.run[:2] for point in POINTS}), ids=lambda run: run[0])
def test_the_config_of_a_point_exists_and_takes_its_overrides(run: tuple[str, tuple[str, ...]]) -> None:
    cfg = load_config(*run)
    method_of(cfg)
    assert cfg.batch_size > 0
