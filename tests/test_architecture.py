"""The structure that docs/design.md describes: packages import in one direction, classes read only what they own."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "torchtune_adaptive"
# A package or module imports only what stands before it.
ORDER = [
    "errors",
    "files",
    "cache",
    "text",
    "logs",
    "progress",
    "signals",
    "memory",
    "distributed",
    "recovery",
    "batch",
    "schedule",
    "settings",
    "search",
]
ORDER += [
    "training",
    "checkpoints",
    "stock",
    "trainer",
    "assembly",
    "recipe",
    "nodes",
    "quiet",
    "launch",
    "plan",
    "report",
    "cli",
    "testing",
    "tiny",
]
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
ADAPTER = "AdaptiveRecipe"
NAMES_OF_STOCK_IN = {"recipe.py", "plan/fake_recipe.py"}
LONGEST_CLASS_LINES = 200
# Attributes that base classes of other libraries set in their constructors.
SET_BY_FOREIGN_BASES = {
    "_DealtOrder": {"dataset", "epoch", "num_replicas", "rank", "seed", "shuffle"},  # DistributedSampler
    "_StandIn": {"param_groups", "state"},  # Optimizer
    "OptimizerOnHost": {"param_groups"},
}
WITHOUT_TORCH = [
    *(
        "errors",
        "files",
        "cache",
        "text",
        "progress",
        "signals",
        "schedule",
        "settings",
        "memory/timeline",
        "memory/allocator_retries",
        "memory/resident",
    ),
    *("batch/limits", "batch/noise_scale", "batch/increase_function"),
    *("search/strategies", "search/tables", "search/token_budget", "search/found_size"),
    *("training/horizon", "training/run_state", "training/file_names"),
    *("report/read", "report/story", "report/page", "report/pictures"),
    *("plan/layer_extrapolation", "plan/host_memory", "plan/step_peaks", "plan/overhead", "plan/gpus", "plan/kernels"),
    *("plan/step_events", "plan/peak_modules", "plan/snapshot_file", "plan/svg", "plan/step_plot", "plan/plot_page"),
]

# Names under which a module has objects of other libraries whose attributes it sets.
WRITTEN_INTO = {
    "distributed/fsdp_state.py": {"group", "parameter", "state"},  # FSDP2's own, after a failure
    "launch.py": {"sys"},  # the command line, with the config's name resolved
    "memory/storages.py": {"torch"},  # a method that no dispatch mode sees
    "cli/main.py": {"parsed"},  # the namespace of argparse
    "cli/tune.py": {"sys"},  # the command line, which torchtune's `run` reads again
    "plan/fake_recipe.py": {
        "module",
        "optimizer",
        "parameter",
        "propagator",
        "recipe",
        "torchtune_offloading",
    },  # set up manually
    "plan/optimizer_stand_ins.py": {"parameter"},  # gradients
    "stock/set_up.py": {"sys"},  # the hook that prints errors of `__del__`
    "training/host_leak.py": {"parameter"},  # gradients, of its own parameters
    "training/learning_rate.py": {"scheduler"},  # which it has just built
    "recovery/optimizer_state.py": {"parameter"},  # gradients
}


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _imports(path: Path) -> Iterator[str]:
    """The parts of the package that a module imports, as "search.find"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torchtune_adaptive":
            inner = (node.module or "").removeprefix("torchtune_adaptive").removeprefix(".")
            yield from [inner] if inner else [alias.name for alias in node.names]


def _package(name: str) -> str:
    return name.partition(".")[0]


def test_every_package_and_module_has_its_place_in_the_order() -> None:
    there = {path.stem if path.parent == PACKAGE else path.parent.name for path in MODULES}
    assert there == set(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_a_module_imports_only_packages_before_its_own(path: Path) -> None:
    own = _package(_name(path).replace("/", ".").removesuffix(".py"))
    later = [name for name in _imports(path) if ORDER.index(_package(name)) > ORDER.index(own)]
    assert later == []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    imports = {_name(path).removesuffix(".py").replace("/", "."): set(_imports(path)) for path in MODULES}
    while leaves := [name for name, needed in imports.items() if not needed & imports.keys()]:
        for name in leaves:
            del imports[name]
    assert imports == {}


def test_every_package_says_what_it_is_for() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


# ---- classes


class Class(NamedTuple):
    path: Path
    node: ast.ClassDef
    bases: list[str]  # within the package
    has_foreign_base: bool


_PLAIN_BASES = {"ABC", "Protocol", "NamedTuple", "Generic", "IntEnum", "Exception", "RuntimeError", "ValueError"}


def _base_name(base: ast.expr) -> str:
    base = base.value if isinstance(base, ast.Subscript) else base
    return base.attr if isinstance(base, ast.Attribute) else ast.unparse(base)


def _classes() -> dict[str, Class]:
    nodes = {
        node.name: (path, node)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = {}
    for name, (path, node) in nodes.items():
        bases = [_base_name(base) for base in node.bases]
        foreign = any(base not in nodes and base not in _PLAIN_BASES for base in bases)
        found[name] = Class(path, node, [base for base in bases if base in nodes], foreign)
    return found


CLASSES = _classes()


def _with_bases(name: str) -> list[Class]:
    one = CLASSES[name]
    return [one, *(inherited for base in one.bases for inherited in _with_bases(base))]


def _attributes_of_self(node: ast.ClassDef, context: type[ast.expr_context]) -> set[str]:
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, context)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }


def _is_record(node: ast.ClassDef) -> bool:
    """Whether annotated names of the class are fields, as in dataclasses and named tuples."""
    return any("dataclass" in ast.unparse(one) for one in node.decorator_list) or any(
        _base_name(base) == "NamedTuple" for base in node.bases
    )


def _names_set(node: ast.ClassDef) -> set[str]:
    names = _attributes_of_self(node, ast.Store)
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.ClassDef):
            names.add(item.name)
        elif isinstance(item, ast.Assign):
            names |= {target.id for target in item.targets if isinstance(target, ast.Name)}
        elif isinstance(item, ast.AnnAssign) and (item.value is not None or _is_record(node)):
            names.add(ast.unparse(item.target))
    return names


def _unowned(name: str) -> set[str]:
    """Attributes that a class reads on ``self`` but neither it nor a base sets; foreign bases are imported."""
    with_bases = _with_bases(name)
    owned = set().union(*(_names_set(one.node) for one in with_bases)) | SET_BY_FOREIGN_BASES.get(name, set())
    if any(one.has_foreign_base for one in with_bases):
        module = importlib.import_module("torchtune_adaptive." + _name(CLASSES[name].path)[:-3].replace("/", "."))
        owned |= set(dir(getattr(module, name)))
    read = _attributes_of_self(CLASSES[name].node, ast.Load)
    return {attribute for attribute in read - owned if not attribute.startswith("__")}


@pytest.mark.parametrize("name", [name for name in CLASSES if name != ADAPTER])
def test_a_class_reads_only_what_it_or_a_base_in_the_package_sets(name: str) -> None:
    assert _unowned(name) == set()


def _declared_by_adapter() -> set[str]:
    """Attributes of torchtune that the adapter declares without a value."""
    body = CLASSES[ADAPTER].node.body
    return {ast.unparse(item.target) for item in body if isinstance(item, ast.AnnAssign) and item.value is None}


def test_the_adapter_declares_every_name_of_torchtunes_that_it_reads() -> None:
    own = _names_set(CLASSES[ADAPTER].node)
    assert _unowned(ADAPTER) <= _declared_by_adapter()
    assert _declared_by_adapter() <= _unowned(ADAPTER) | own


@pytest.mark.parametrize("path", [path for path in MODULES if _name(path) not in NAMES_OF_STOCK_IN], ids=_name)
def test_only_the_adapter_and_the_plans_recipe_name_private_attributes_of_stock_recipes(path: Path) -> None:
    private = {name for name in _declared_by_adapter() if name.startswith("_")}
    named = {
        ast.unparse(part)
        for part in ast.walk(ast.parse(path.read_text()))
        if isinstance(part, ast.Attribute)
        and part.attr in private
        and not (isinstance(part.value, ast.Name) and part.value.id in ("self", "cls", "other"))
    }
    assert named == set()


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_a_module_does_not_set_attributes_of_other_objects(path: Path) -> None:
    """Exceptions for objects of other libraries are listed in ``WRITTEN_INTO``."""
    written = {
        ast.unparse(part.value).partition(".")[0] if not ast.unparse(part).startswith("self.") else ast.unparse(part)
        for part in ast.walk(ast.parse(path.read_text()))
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) != "self"
    }
    assert written == WRITTEN_INTO.get(_name(path), set())


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_with_all_its_bases_is_short(name: str) -> None:
    lines = sum((one.node.end_lineno or 0) - one.node.lineno + 1 for one in _with_bases(name))
    assert lines <= LONGEST_CLASS_LINES


# ---- modules


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_plain_arithmetic_does_not_import_torch(name: str) -> None:
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.partition(".")[0] in ("torch", "torchtune")]


def test_private_state_of_fsdp_is_touched_in_one_module_only() -> None:
    private = re.compile(r"_fsdp_param|_get_fsdp_state|_training_state|_state_ctx|_comm_ctx")
    assert [_name(path) for path in MODULES if private.search(path.read_text())] == ["distributed/fsdp_state.py"]
