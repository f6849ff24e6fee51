"""The rooms import as docs/design.md says, private state of FSDP2 is in one room, and files stay small."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "torchtune_adaptive"
ROOMS = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
LONGEST_FILE_LINES = 250
PLAIN_ROOMS = ["search", "forecast", "layers", "peaks", "horizon", "thrashing", "batching", "schedule", "settings"]
PLAIN_ROOMS += ["errors", "units", "gpus", "overhead", "components", "noise_scale", "token_budget"]


def _documented() -> dict[str, set[str]]:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]*)\|$", (REPOSITORY / "docs" / "design.md").read_text(), re.M)
    return {room: set(re.findall(r"\w+", imports)) for room, imports in rows}


def _imported(room: str) -> set[str]:
    tree = ast.parse((PACKAGE / f"{room}.py").read_text())
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {
        module.removeprefix("torchtune_adaptive.") for module in modules if module.startswith("torchtune_adaptive.")
    }


def test_every_room_is_in_the_design_and_every_room_in_the_design_exists() -> None:
    assert sorted(_documented()) == ROOMS


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_the_design_says(room: str) -> None:
    assert _imported(room) == _documented()[room]


def test_imports_point_one_way_but_for_the_meter_and_its_two_devices() -> None:
    order = list(_documented())
    upward = {
        (room, imported) for room in order for imported in _imported(room) if order.index(imported) >= order.index(room)
    }
    assert upward == {("meter", "cpu_meter"), ("meter", "cuda_meter")}


@pytest.mark.parametrize("room", PLAIN_ROOMS)
def test_rooms_of_plain_arithmetic_do_not_import_torch(room: str) -> None:
    tree = ast.parse((PACKAGE / f"{room}.py").read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.partition(".")[0] in ("torch", "torchtune")]


def test_private_state_of_fsdp_is_touched_in_one_room_only() -> None:
    private = re.compile(r"_fsdp_param|_get_fsdp_state|_training_state|_state_ctx|_comm_ctx")
    assert [room for room in ROOMS if private.search((PACKAGE / f"{room}.py").read_text())] == ["fsdp_state"]


@pytest.mark.parametrize("room", ROOMS)
def test_a_file_stays_readable(room: str) -> None:
    assert len((PACKAGE / f"{room}.py").read_text().splitlines()) <= LONGEST_FILE_LINES
