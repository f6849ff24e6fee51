"""Which part of the package may import which."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torchtune_adaptive

PACKAGE = Path(torchtune_adaptive.__file__).parent
# From the bottom to the top: a part imports only itself and parts above it in this list.
LAYERS = [
    {"errors"},
    {"text", "files", "output"},
    {"engine"},
    {"settings", "schedule", "increase_function"},
    {"training", "testing", "tiny", "integrations"},
    {"stock"},
    {"launch"},
    {"plan", "report", "fastest", "cli"},
    {"ppo"},  # which nobody else imports
]
NEVER_IN_ENGINE = {"torchtune", "torchao", "omegaconf", "tqdm", "numpy"}
ALL_FUNCTIONS = f"""
import importlib.machinery
import sys


class Forbidden:
    def find_spec(self, name, *_):
        forbidden = name.partition(".")[0] in {sorted(NEVER_IN_ENGINE)}
        return importlib.machinery.ModuleSpec(name, self, origin="") if forbidden else None

    def create_module(self, spec):
        return None  # as usual

    def exec_module(self, module):
        raise ModuleNotFoundError(f"No module named {{module.__name__!r}}", name=module.__name__)


sys.meta_path.insert(0, Forbidden())
import torch
from torchtune_adaptive import RecoverableStep, find_max_batch_size, plan_max_batch_size
from torchtune_adaptive.engine.progress import Bar

assert list(Bar(range(3))) == [0, 1, 2]
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())


def micro_step(rows):
    loss = model(rows).sum()
    loss.backward()
    return loss.detach()


def train_step(rows):
    micro_step(rows)
    optimizer.step()


found = find_max_batch_size(
    train_step, lambda n: torch.ones(n, 8), model=model, optimizer=optimizer, memory_limit="64KiB"
)
step = RecoverableStep(model, micro_step, micro_batch_size=2, optimizer=optimizer)
loss = step(torch.ones(5, 8))
assert found.batch_size > 100, found
assert step.recovers
assert torch.isfinite(loss), loss
assert all(parameter.grad is not None for parameter in model.parameters())


def planned_step(model, optimizer, rows):
    model(rows).sum().backward()
    optimizer.step()


plan = plan_max_batch_size(
    lambda: torch.nn.Linear(8, 8),
    lambda model: torch.optim.AdamW(model.parameters()),
    planned_step,
    lambda n: torch.ones(n, 8),
    memory="64KiB",
    device="cpu",
)
assert plan.decisive.largest_batch_size > 100, plan
assert "Linear: " in str(plan), plan
"""


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _part(name: str) -> str:
    return name.split(".")[1]


def test_a_part_imports_only_parts_below_it():
    layer = {part: number for number, parts in enumerate(LAYERS) for part in parts}
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in PACKAGE.rglob("*.py")
        if path.parent != PACKAGE or path.stem != "__init__"
        for name in _imports(path)
        if name.startswith("torchtune_adaptive.")
        and layer[_part(name)] > layer[path.relative_to(PACKAGE).with_suffix("").parts[0]]
    ]
    assert not wrong


def test_the_engine_imports_torch_and_the_standard_library_alone():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in (PACKAGE / "engine").rglob("*.py")
        for name in _imports(path)
        if (name.split(".")[0] in NEVER_IN_ENGINE and (path.name, name) != ("progress.py", "tqdm.tqdm"))
        or (name.startswith("torchtune_adaptive.") and _part(name) not in {"engine", "errors", "text"})
    ]
    assert not wrong


def test_a_search_a_plan_and_a_step_that_recovers_run_with_torch_alone():
    run = subprocess.run([sys.executable, "-c", ALL_FUNCTIONS], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
