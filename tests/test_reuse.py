"""A size found before is reused if all conditions are the same and one probe fits; otherwise the search runs."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.test_sizes import AUTO, GRADIENT_BYTES, MAXIMUM, TOKEN_BYTES, Device, loader_over
from tests.toys import Samples
from torchtune_adaptive import cache
from torchtune_adaptive.batch.loader import StepLoader
from torchtune_adaptive.batch.row_format import TokenRows
from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.search import reuse
from torchtune_adaptive.search import sizes as sizes_module
from torchtune_adaptive.search.reuse import FoundSize, FoundSizes, conditions, sizes_of_searches
from torchtune_adaptive.search.sizes import SizeFinder, Sizes
from torchtune_adaptive.settings import AdaptiveSettings

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # by torchdata 0.11

FOUND = FoundSize(
    exact_batch_size=13,
    batch_size=8,
    fitting_rows=8,
    memory_limit_bytes=1100,
    forecast_rows=13.75,
    token_budget=None,
    tokens_per_second=None,
)
CONFIG: dict[str, Any] = {
    "model._component_": "torchtune.models.llama2.llama2",
    "model.num_layers": 2,
    "optimizer._component_": "torch.optim.AdamW",
    "optimizer.lr": 0.1,
    "loss._component_": "torchtune.modules.loss.CEWithChunkedOutputLoss",
    "dtype": "bf16",
}
ASKED: dict[str, Any] = {"seq_len": 8, "packed": False, "most_rows": 50}


class Ranks:
    """Replaces a consensus: ``world_size`` ranks that all have the same values."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def from_all_ranks(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def ask_rank_zero(self, ask: Callable[[], Any]) -> Any:
        return ask()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The GPU that a run finds; its entries may be changed."""
    found = {"name": "H100", "bytes": 80 * 2**30}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: found["name"])
    monkeypatch.setattr(reuse, "device_memory_bytes", lambda _: found["bytes"])
    return found


def store(
    folder: Path,
    config: dict[str, Any] | None = None,
    *,
    recipe: str = "Full",
    world_size: int = 2,
    **settings: Any,
) -> FoundSizes:
    """The store of a run on a GPU, with changes to its config and settings."""
    ranks = cast(Consensus, Ranks(world_size))
    settings = {"use_maximum_batch_size": True} | settings
    under = conditions(
        CONFIG | (config or {}),
        AdaptiveSettings(**settings),
        recipe=recipe,
        device=torch.device("cuda"),
        consensus=ranks,
    )
    return FoundSizes(under, ranks, folder, reads=True)


# ---- conditions of reuse


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    "changed",
    [
        {"config": {"model.num_layers": 3}},
        {"config": {"model._component_": "torchtune.models.llama2.lora_llama2"}},
        {"config": {"dtype": "fp32"}},
        {"config": {"compile": True}},
        {"config": {"enable_activation_checkpointing": True}},
        {"config": {"enable_activation_offloading": True}},
        {"config": {"fsdp_cpu_offload": True}},
        {"config": {"fsdp_reshard_after_forward": False}},
        {"config": {"custom_sharded_layers.0": "output"}},
        {"config": {"optimizer._component_": "torch.optim.SGD"}},
        {"config": {"optimizer.fused": True}},
        {"config": {"optimizer_in_bwd": True}},
        {"config": {"loss._component_": "torch.nn.CrossEntropyLoss"}},
        {"config": {"clip_grad_norm": 1.0}},
        {"config": {"gradient_accumulation_steps": 2}},
        {"config": {"a_key_that_nobody_knows": 1}},
        {"recipe": "LoRA"},
        {"world_size": 4},
        {"power_of_two": False},
        {"max_batch_size": 32},
        {"memory_limit_bytes": 2**30},
        {"margin": 0.1},
        {"max_tokens_per_micro_batch": "auto"},
        {"global_batch_size": 64},
        {"growth_limit": "none"},
        {"objective": "throughput"},
    ],
    ids=str,
)
def test_a_size_is_not_reused_if_anything_that_may_affect_memory_has_changed(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    store(tmp_path).keep(FOUND, **ASKED)
    assert store(tmp_path).known(**ASKED) == FOUND
    assert store(tmp_path, **changed).known(**ASKED) is None


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    "changed",
    [
        {"config": {"optimizer.lr": 0.2}},
        {"config": {"output_dir": "/elsewhere", "metric_logger.log_dir": "/elsewhere", "seed": 3}},
        {"config": {"epochs": 9, "max_steps_per_epoch": 7, "lr_scheduler.num_warmup_steps": 1}},
        {"config": {"checkpointer.checkpoint_dir": "/elsewhere", "resume_from_checkpoint": True}},
        {"config": {"batch_size": 3, "adaptive.strategy": "binary_search"}, "strategy": "binary_search"},
        {"oom_recovery": False, "save_every_n_steps": 3, "reuse_found_size": True},
    ],
    ids=str,
)
def test_a_size_is_reused_if_only_values_that_do_not_affect_memory_have_changed(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    store(tmp_path).keep(FOUND, **ASKED)
    assert store(tmp_path, **changed).known(**ASKED) == FOUND


@pytest.mark.parametrize("changed", [{"seq_len": 9}, {"packed": True}, {"most_rows": 51}], ids=str)
def test_a_size_is_not_reused_for_other_rows(changed: dict[str, Any], tmp_path: Path, card: dict[str, Any]) -> None:
    store(tmp_path).keep(FOUND, **ASKED)
    assert store(tmp_path).known(**ASKED | changed) is None


@pytest.mark.parametrize("changed", [{"name": "A100"}, {"bytes": 40 * 2**30}], ids=str)
def test_a_size_is_not_reused_on_another_gpu(changed: dict[str, Any], tmp_path: Path, card: dict[str, Any]) -> None:
    store(tmp_path).keep(FOUND, **ASKED)
    card.update(changed)
    assert store(tmp_path).known(**ASKED) is None


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("name", "value"), [("LOCAL_WORLD_SIZE", "1"), ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")]
)
def test_a_size_is_not_reused_on_other_nodes_or_with_another_allocator(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path).keep(FOUND, **ASKED)
    monkeypatch.setenv(name, value)
    assert store(tmp_path).known(**ASKED) is None


@pytest.mark.usefixtures("card")
def test_a_size_is_not_reused_with_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path).keep(FOUND, **ASKED)
    monkeypatch.setattr(cache, "_versions", lambda: ["another"])
    assert store(tmp_path).known(**ASKED) is None


@pytest.mark.usefixtures("card")
def test_a_size_is_not_kept_for_components_of_unknown_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = store(tmp_path, {"loss._component_": "mine.Loss"})
    mine.keep(FOUND, **ASKED)
    assert mine.known(**ASKED) is None
    assert caplog.messages == ["No size is reused, because components of other packages may have changed: searching."]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "is_there"),
    [
        ({}, False),
        ({"use_maximum_batch_size": True}, False),
        ({"use_maximum_batch_size": True, "search_only": True}, True),
        ({"use_maximum_batch_size": True, "reuse_found_size": True}, True),
        ({"reuse_found_size": True}, False),
    ],
)
def test_sizes_are_kept_where_that_is_asked_for(settings: dict[str, Any], is_there: bool) -> None:
    found = sizes_of_searches(
        CONFIG,
        AdaptiveSettings(**settings),
        recipe="Full",
        device=torch.device("cpu"),
        consensus=cast(Consensus, Ranks(1)),
    )
    assert (found is not None) == is_there


# ---- in a search


def find(
    folder: Path,
    loader: StepLoader | None = None,
    *,
    reads: bool = True,
    limit_bytes: int = 1100,
    margin: float = 0.0,
    power_of_two: bool = True,
    **settings: Any,
) -> tuple[Sizes, list[tuple[int, int]]]:
    """What is found, and rows and length of each step that was tried. Only ``settings`` are conditions here."""
    device = Device()
    options: dict[str, Any] = {"margin": margin, "power_of_two": power_of_two, "memory_limit_bytes": limit_bytes}
    sizes = SizeFinder(
        device.workload,
        loader or loader_over(Samples(*[8] * 50)),
        TokenRows(-100),
        AdaptiveSettings(**options | settings),
        models=[device.model],
        wanted_rows=4,
        tokenizer_max_seq_len=None,
        found_sizes=FoundSizes(settings, device.workload.consensus, folder, reads=reads),
    ).find()
    return sizes, [(rows, length) for _, rows, length in device.tried]


def same(sizes: Sizes) -> tuple[Any, ...]:
    """What training uses of the sizes."""
    assert sizes.result is not None
    found = sizes.result.exact_batch_size, sizes.result.batch_size, sizes.fitting_rows
    return *found, sizes.token_budget, sizes.tokens_per_second, sizes.seq_len


def was_reused(sizes: Sizes) -> bool:
    assert sizes.result is not None
    return sizes.result.reused


def test_a_size_found_before_is_tried_once_and_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = find(tmp_path, **MAXIMUM)
    caplog.clear()
    again, tried = find(tmp_path, **MAXIMUM)
    assert same(first) == same(again) == (13, 8, 8, None, None, 8)
    assert (was_reused(first), was_reused(again)) == (False, True)
    assert tried == [(2, 8), (13, 8)]  # the first step makes the optimizers' state
    assert again.result is not None
    assert [probe.batch_size for probe in again.result.probes] == [13]
    assert len(caplog.messages) == 1
    assert "found before: largest batch_size that fits 13, used 8 (rows of 8 tokens" in caplog.messages[0]


def test_a_search_that_is_not_to_reuse_a_size_searches_and_keeps_it(tmp_path: Path) -> None:
    assert not was_reused(find(tmp_path, **MAXIMUM)[0])
    assert not was_reused(find(tmp_path, reads=False, **MAXIMUM)[0])
    assert was_reused(find(tmp_path, **MAXIMUM)[0])


def test_a_size_that_no_longer_fits_is_searched_again_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    find(tmp_path, **MAXIMUM)
    caplog.clear()
    less, tried = find(tmp_path, limit_bytes=600, **MAXIMUM)
    assert same(less) == same(find(tmp_path / "other", limit_bytes=600, **MAXIMUM)[0])
    assert not was_reused(less)
    assert tried[1] == (13, 8)
    assert caplog.messages[0] == "batch_size 13, found before, no longer fits: searching."
    again, tried = find(tmp_path, limit_bytes=600, **MAXIMUM)
    assert (was_reused(again), same(again), tried) == (True, same(less), [(2, 8), (7, 8)])


def test_a_size_found_with_less_memory_is_searched_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    find(tmp_path, **MAXIMUM)
    caplog.clear()
    more, _ = find(tmp_path, limit_bytes=2000, **MAXIMUM)
    assert same(more)[0] == 25
    assert caplog.messages[0].startswith("batch_size 13, found before, is not reused, because memory was 1.1 KiB then")
    find(tmp_path / "other", limit_bytes=1100, **MAXIMUM)
    assert was_reused(find(tmp_path / "other", limit_bytes=1110, **MAXIMUM)[0])  # as much as a driver may take


@pytest.mark.parametrize("rows", [{}, {"max_batch_size": 7}])
def test_a_size_is_not_reused_with_another_bound(rows: dict[str, Any], tmp_path: Path) -> None:
    find(tmp_path, **MAXIMUM)
    shorter = loader_over(Samples(*[8] * 12)) if not rows else None
    sizes, _ = find(tmp_path, shorter, **MAXIMUM | rows)
    assert not was_reused(sizes)
    assert sizes.result is not None
    assert sizes.result.exact_batch_size == (7 if rows else 12)


def test_a_token_budget_is_reused_with_one_more_probe_for_the_tokens_beyond_whole_rows(tmp_path: Path) -> None:
    def budget(tokens: int) -> tuple[Sizes, list[tuple[int, int]]]:
        loader, limit_bytes = loader_over(Samples(*[256] * 50), batch_size=50), tokens * TOKEN_BYTES + GRADIENT_BYTES
        return find(tmp_path, loader, limit_bytes=limit_bytes, power_of_two=False, **AUTO)

    first, _ = budget(1920)
    again, tried = budget(1920)
    assert (first.token_budget, same(again)) == (1920, same(first))
    assert tried == [(2, 256), (7, 256), (2, 240), (8, 240)]  # the first of each makes the optimizers' state
    less, tried = budget(7 * 256)  # the rows still fit, the tokens beyond them do not
    assert less.token_budget == 7 * 256
    assert tried[:4] == [(2, 256), (7, 256), (2, 240), (8, 240)]
    kept, tried = budget(7 * 256)
    assert (kept.token_budget, tried) == (7 * 256, [(2, 256), (7, 256)])


def test_sizes_that_were_timed_are_not_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def tokens_per_second(*_: Any, **__: Any) -> dict[int, float]:
        timed.append(1)
        return {12: 1000.0, 6: 990.0, 3: 900.0, 1: 300.0}

    monkeypatch.setattr(sizes_module, "tokens_per_second", tokens_per_second)
    first, again = (find(tmp_path, objective="throughput", max_batch_size=12, **MAXIMUM)[0] for _ in range(2))
    assert same(first) == same(again)
    assert (again.fitting_rows, again.tokens_per_second) == (6, {12: 1000.0, 6: 990.0, 3: 900.0, 1: 300.0})
    assert timed == [1]


# ---- bad files


def _entry(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def _write(folder: Path, content: Any) -> None:
    _entry(folder).write_text(json.dumps(content))


def _is_a_folder(folder: Path) -> None:
    path = _entry(folder)
    path.unlink()
    (path / "x").mkdir(parents=True)


def _is_a_file(folder: Path) -> None:
    _entry(folder).unlink()
    folder.rmdir()
    folder.write_text("")


SPOILT: dict[str, Callable[[Path], object]] = {
    "truncated": lambda folder: _entry(folder).write_bytes(_entry(folder).read_bytes()[:-20]),
    "empty": lambda folder: _entry(folder).write_bytes(b""),
    "garbage": lambda folder: _entry(folder).write_bytes(bytes(range(256))),
    "deeply nested": lambda folder: _entry(folder).write_text("[" * 100_000),
    "no mapping": lambda folder: _write(folder, None),
    "another version": lambda folder: _write(folder, FOUND.as_json() | {"format": 2}),
    "a key too few": lambda folder: _write(folder, {"format": 1, "batch_size": 8}),
    "no numbers": lambda folder: _write(folder, FOUND.as_json() | {"batch_size": "8"}),
    "no integer": lambda folder: _write(folder, FOUND.as_json() | {"exact_batch_size": 13.5}),
    "a budget in words": lambda folder: _write(folder, FOUND.as_json() | {"token_budget": "many"}),
    "rates in a list": lambda folder: _write(folder, FOUND.as_json() | {"tokens_per_second": [1]}),
    "no rates": lambda folder: _write(folder, FOUND.as_json() | {"tokens_per_second": {}}),
    "contradictory": lambda folder: _write(folder, FOUND.as_json() | {"exact_batch_size": 3}),
    "not above zero": lambda folder: _write(folder, FOUND.as_json() | {"fitting_rows": 0}),
    "a folder in its place": _is_a_folder,
    "a file in the folder's place": _is_a_file,
}


@pytest.mark.parametrize("how", SPOILT)
def test_an_entry_that_cannot_be_used_is_ignored(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "sizes"
    first, _ = find(folder, **MAXIMUM)
    SPOILT[how](folder)
    caplog.clear()
    again, _ = find(folder, **MAXIMUM)
    assert (was_reused(again), same(again)) == (False, same(first))
    searching, _, *warnings = caplog.messages
    assert searching == "No size was found before under the same conditions: searching."
    in_the_way = how.endswith("place")
    assert len(warnings) == int(in_the_way)
    assert all(one.startswith("The size found cannot be kept for later runs: ") for one in warnings)
    assert was_reused(find(folder, **MAXIMUM)[0]) != in_the_way


def test_a_folder_that_cannot_be_written_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    sizes, _ = find(Path("/proc/torchtune_adaptive"), **MAXIMUM)  # read-only for everybody
    assert same(sizes)[0] == 13
    assert len([one for one in caplog.messages if one.startswith("The size found cannot be kept")]) == 1


def test_a_disk_that_is_full_leaves_the_former_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find(tmp_path, **MAXIMUM)

    def refuse(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", refuse)
        find(tmp_path, reads=False, **MAXIMUM)
    assert caplog.messages[-1] == "The size found cannot be kept for later runs: OSError: no space left on device."
    assert was_reused(find(tmp_path, **MAXIMUM)[0])


def test_an_entry_says_all_that_a_later_run_needs() -> None:
    timed = replace(FOUND, tokens_per_second={8: 1000.0, 4: 990.5}, token_budget=110, forecast_rows=None)
    for found in (FOUND, timed):
        assert FoundSize.from_json(json.loads(json.dumps(found.as_json()))) == found


# ---- several programs

READS_AND_WRITES = """
import sys
from pathlib import Path
from torchtune_adaptive.cache import KeptFiles, Question

files, question = KeptFiles(Path(sys.argv[1]), ending=".json", most=512), Question({}, "size")
for turn in range(100):
    files.write(question, {"from": sys.argv[2], "rows": [turn] * 3000})
    read = files.read(question, lambda content: content)
    assert read is not None and len(set(read["rows"])) == 1 and len(read["rows"]) == 3000, read
"""


def test_eight_programs_read_and_write_one_entry(tmp_path: Path) -> None:
    command = [sys.executable, "-c", READS_AND_WRITES, str(tmp_path)]
    programs = [
        subprocess.Popen([*command, str(number)], stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
        for number in range(8)
    ]
    assert [program.communicate()[1] for program in programs] == [""] * 8
    assert len(list(tmp_path.iterdir())) == 1
