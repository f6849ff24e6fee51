"""The reference pages of the documentation, put together from the settings and the parsers.

    python -m scripts.reference

Writes ``docs/configuration.md`` and ``docs/command_line.md``.
"""

import argparse
import inspect
import os
import re
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args
from unittest import mock

from omegaconf import OmegaConf

from torchtune_adaptive import schedule
from torchtune_adaptive.cli.main import _parser
from torchtune_adaptive.settings import CONFIG_KEYS, AdaptiveSettings

DOCS = Path(__file__).resolve().parent.parent / "docs"
# Values that a type does not say.
_VALUES = {
    "batch_increase_function": "a dotted path or a mapping with a `_component_`, or null",
    "adaptive.memory_limit": "a size like 80GiB or whole bytes, at least one byte, or null",
    "adaptive.margin": "in [0, 1)",
}
_KINDS = {bool: "True or False", int: "an integer, at least 1", NoneType: "null"}
_EXAMPLES = (
    "use_maximum_batch_size=True adaptive.global_batch_size=256",
    "use_maximum_batch_size=True adaptive.memory_limit=256MiB adaptive.objective=throughput",
    "adaptive.global_batch_size=256 adaptive.max_tokens_per_micro_batch=auto",
    "batch_increase_function._component_=torchtune_adaptive.schedule.geometric batch_increase_function.factor=2",
    "batch_increase_function._component_=torchtune_adaptive.schedule.gradient_noise_scale"
    " adaptive.global_batch_size=64 adaptive.growth_limit=1024",
    "adaptive.save_every_n_steps=200 adaptive.keep_last_n_checkpoints=2 adaptive.save_in_background=True",
)
_NAME = re.compile(r"(?<![`\w])(?:\w+\([^)]*\)|[\w.]*_\w+)(?![`\w])")
_CONFIGURATION = """\
# Configuration

<!-- generated from torchtune_adaptive/settings.py: make reference -->

These keys can be added to any torchtune config for a method that has an adaptive recipe. A key that is
missing has its default. A key or value that is wrong is refused in one sentence before training starts.
torchtune's own `resume_from_checkpoint` may also be `auto` or a path: see [Checkpoints](checkpoints.md).

| key | default | values | meaning |
|---|---|---|---|
{keys}

A config file with all of them, and their defaults:

```yaml
{defaults}
```

On the command line, as with any other key of the config:

```bash
{commands}
```

## Growth functions

`batch_increase_function` may name one of these, or a function of yours.

| `_component_` | arguments | what it does |
|---|---|---|
{functions}
"""


def configuration() -> str:
    """The page of all keys that this package adds to a config."""
    defaults = OmegaConf.create({})
    keys = []
    for field, key in zip(fields(AdaptiveSettings), CONFIG_KEYS, strict=True):
        OmegaConf.update(defaults, key.path, key.default)
        values = _VALUES.get(key.path) or _values(get_args(field.type)[0])
        keys.append(f"| `{key.path}` | `{_written(key.default)}` | {_marked(values)} | {_marked(key.description)} |")
    run = "tune run --nproc_per_node 2 adaptive_full_finetune_distributed --config tiny/full"
    return _CONFIGURATION.format(
        keys="\n".join(keys),
        defaults=OmegaConf.to_yaml(defaults).rstrip("\n"),
        commands="\n".join(f"{run} \\\n    {example}" for example in _EXAMPLES),
        functions="\n".join(_row_of_function(name) for name in schedule.__all__),
    )


def command_line() -> str:
    """The page of all commands of ``tune-adaptive``: their help."""
    program = _parser()
    (commands,) = [one for one in program._actions if isinstance(one, argparse._SubParsersAction)]
    parsers: dict[str, argparse.ArgumentParser] = {program.prog: program}
    parsers |= {f"{program.prog} {name}": parser for name, parser in commands.choices.items()}
    lines = ["# Command line", "", "<!-- generated from the parsers of tune-adaptive: make reference -->", ""]
    with mock.patch.dict(os.environ, COLUMNS="110"):
        for name, parser in parsers.items():
            lines += [f"## `{name}`", "", "```text", parser.format_help().rstrip("\n"), "```", ""]
    return "\n".join(lines)


PAGES = {DOCS / "configuration.md": configuration, DOCS / "command_line.md": command_line}


def _values(kind: Any) -> str:
    """What a key of this type may be.

    >>> _values(int | None)
    'an integer, at least 1, or null'
    """
    parts = get_args(kind) or (kind,)
    words = [word for part in parts for word in get_args(part) or (part,) if isinstance(word, str)]
    kinds = [_KINDS[part] for part in parts if part in _KINDS]
    return ", or ".join([", ".join(words), *kinds] if words else kinds)


def _row_of_function(name: str) -> str:
    """What a config may name as its ``batch_increase_function``."""
    function = getattr(schedule, name)
    arguments = ", ".join(
        f"`{one.name}`" if one.default is one.empty else f"`{one.name}={one.default}`"
        for one in inspect.signature(function).parameters.values()
    )
    promise = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    return f"| `{schedule.__name__}.{name}` | {arguments} | {_marked(promise)} |"


def _marked(text: str) -> str:
    """``text`` for a table's cell, with names of code marked as such.

    >>> _marked("a _component_, as in f(epoch) or `max_size`")
    'a `_component_`, as in `f(epoch)` or `max_size`'
    """
    return _NAME.sub(r"`\g<0>`", text.replace("``", "`")).replace("|", "\\|")


def _written(value: object) -> str:
    """A default as YAML writes it."""
    return "null" if value is None else str(value)


def main() -> None:
    """Write the pages."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, content in PAGES.items():
        path.write_text(content())


if __name__ == "__main__":
    main()
