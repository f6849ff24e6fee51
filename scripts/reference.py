"""The generated parts of ``docs/reference.md``: keys, growth functions and command line, from the code that reads them.

    python -m scripts.reference

A part stands between the comments ``<!-- NAME: make reference -->`` and ``<!-- end -->``.
"""

import argparse
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args
from unittest import mock

from torchtune_adaptive import schedule
from torchtune_adaptive.cli.commands import _parser
from torchtune_adaptive.cli.plan_hugging_face import parser_of_models
from torchtune_adaptive.settings import CONFIG_KEYS, AdaptiveSettings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
# Values that a type does not say.
_VALUES = {
    "batch_increase_function": "a dotted path or a mapping with a `_component_`, or null",
    "adaptive.memory_limit": "a size like 80GiB or whole bytes, at least one byte, or null",
    "adaptive.margin": "in [0, 1)",
}
_KINDS = {bool: "True or False", int: "an integer, at least 1", NoneType: "null"}
_NAME = re.compile(r"(?<![`\w])(?:\w+\([^)]*\)|[\w.]*_\w+)(?![`\w])")
_PART = re.compile(r"(<!-- (?P<name>[\w ]+): make reference -->\n).*?(<!-- end -->)", re.DOTALL)


def keys() -> str:
    """The table of all keys that this package adds to a config."""
    rows = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for field, key in zip(fields(AdaptiveSettings), CONFIG_KEYS, strict=True):
        values = _VALUES.get(key.path) or _values(get_args(field.type)[0])
        default = "null" if key.default is None else key.default  # as YAML writes it
        rows.append(f"| `{key.path}` | `{default}` | {_marked(values)} | {_marked(key.description)} |")
    return "\n".join(rows)


def growth_functions() -> str:
    """The table of functions that a config may name as its ``batch_increase_function``."""
    rows = ["| `_component_` | arguments | what it does |", "|---|---|---|"]
    for name in schedule.__all__:
        function = getattr(schedule, name)
        arguments = ", ".join(
            f"`{one.name}`" if one.default is one.empty else f"`{one.name}={one.default}`"
            for one in inspect.signature(function).parameters.values()
        )
        promise = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
        rows.append(f"| `{schedule.__name__}.{name}` | {arguments} | {_marked(promise)} |")
    return "\n".join(rows)


def command_line() -> str:
    """The help of all commands of ``tune-adaptive``."""
    program = _parser()
    (commands,) = [one for one in program._actions if isinstance(one, argparse._SubParsersAction)]
    parsers: dict[str, argparse.ArgumentParser] = {program.prog: program}
    for name, parser in commands.choices.items():
        parsers[f"{program.prog} {name}"] = parser
        if name == "plan":
            parsers[f"{program.prog} plan --hf"] = parser_of_models()
    with mock.patch.dict(os.environ, COLUMNS="110"):
        helps = {name: parser.format_help().rstrip("\n") for name, parser in parsers.items()}
    return "\n\n".join(f"### `{name}`\n\n```text\n{text}\n```" for name, text in helps.items())


_PARTS: dict[str, Callable[[], str]] = {
    "keys": keys,
    "growth functions": growth_functions,
    "command line": command_line,
}


def with_parts(page: str) -> str:
    """The text of ``page`` with its generated parts as they are now."""
    return _PART.sub(lambda part: f"{part[1]}\n{_PARTS[part['name']]()}\n\n{part[3]}", page)


def _values(kind: Any) -> str:
    """What a key of this type may be.

    >>> _values(int | None)
    'an integer, at least 1, or null'
    """
    parts = get_args(kind) or (kind,)
    words = [word for part in parts for word in get_args(part) or (part,) if isinstance(word, str)]
    kinds = [_KINDS[part] for part in parts if part in _KINDS]
    return ", or ".join([", ".join(words), *kinds] if words else kinds)


def _marked(text: str) -> str:
    """``text`` for a table's cell, with names of code marked as such.

    >>> _marked("a _component_, as in f(epoch) or `max_size`")
    'a `_component_`, as in `f(epoch)` or `max_size`'
    """
    return _NAME.sub(r"`\g<0>`", text.replace("``", "`")).replace("|", "\\|")


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(with_parts(PAGE.read_text()))


if __name__ == "__main__":
    main()
