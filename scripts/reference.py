"""The reference pages of the documentation, put together from the settings and the parsers.

    python -m scripts.reference

Writes ``docs/configuration.md`` and ``docs/command_line.md``.
"""

import argparse
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import OmegaConf

from scripts.site_pages import REPOSITORY
from torchtune_adaptive import schedule
from torchtune_adaptive.cli.main import _parser
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.settings import CONFIG_KEYS, AdaptiveSettings, ConfigKey

# For every key the overrides of a run that uses it.
EXAMPLES = {
    "use_maximum_batch_size": "use_maximum_batch_size=True",
    "batch_increase_function": (
        "batch_increase_function._component_=torchtune_adaptive.schedule.geometric batch_increase_function.factor=2"
    ),
    "adaptive.strategy": "use_maximum_batch_size=True adaptive.strategy=binary_search",
    "adaptive.power_of_two": "use_maximum_batch_size=True adaptive.power_of_two=False",
    "adaptive.max_batch_size": "use_maximum_batch_size=True adaptive.max_batch_size=64",
    "adaptive.memory_limit": "use_maximum_batch_size=True adaptive.memory_limit=40GiB",
    "adaptive.margin": "use_maximum_batch_size=True adaptive.margin=0.1",
    "adaptive.seq_len": "use_maximum_batch_size=True adaptive.seq_len=4096",
    "adaptive.oom_recovery": "adaptive.oom_recovery=False",
    "adaptive.global_batch_size": "use_maximum_batch_size=True adaptive.global_batch_size=256",
    "adaptive.max_tokens_per_micro_batch": "adaptive.global_batch_size=256 adaptive.max_tokens_per_micro_batch=auto",
    "adaptive.growth_limit": (
        "batch_increase_function._component_=torchtune_adaptive.schedule.gradient_noise_scale"
        " adaptive.global_batch_size=64 adaptive.growth_limit=1024"
    ),
    "adaptive.lr_scaling": "use_maximum_batch_size=True adaptive.lr_scaling=sqrt",
    "adaptive.objective": "use_maximum_batch_size=True adaptive.objective=throughput",
    "adaptive.save_every_n_steps": "adaptive.save_every_n_steps=200",
    "adaptive.keep_last_n_checkpoints": "adaptive.save_every_n_steps=200 adaptive.keep_last_n_checkpoints=2",
    "adaptive.save_in_background": "adaptive.save_every_n_steps=200 adaptive.save_in_background=True",
    "adaptive.search_only": "use_maximum_batch_size=True adaptive.search_only=True",
    "adaptive.reuse_found_size": "use_maximum_batch_size=True adaptive.reuse_found_size=True",
}
_WRONG_VALUES: tuple[Any, ...] = ({"no": "value"}, -1)  # for every key
_NAME = re.compile(r"(?<![`\w])(?:\w+\([^)]*\)|[\w.]*_\w+)(?![`\w])")


def configuration() -> str:
    """The page of all keys that this package adds to a config."""
    keys = [
        f"| [`{key.path}`](#{key.path.replace('.', '')}) | `{_written(key.default)}` | {_cell(key.description)} |"
        for key in CONFIG_KEYS
    ]
    defaults = OmegaConf.create({})
    for key in CONFIG_KEYS:
        OmegaConf.update(defaults, key.path, key.default)
    return "\n".join(
        [
            "# Configuration",
            "",
            "<!-- generated from torchtune_adaptive/settings.py: make reference -->",
            "",
            "These keys can be added to any torchtune config for a method that has an adaptive recipe. A key that is",
            "missing has its default. A key or value that is wrong is refused in one sentence before training starts.",
            "torchtune's own `resume_from_checkpoint` may also be `auto` or a path: see [Checkpoints](checkpoints.md).",
            "",
            "| key | default | meaning |",
            "|---|---|---|",
            *keys,
            "",
            "A config file with all of them, and their defaults:",
            "",
            "```yaml",
            OmegaConf.to_yaml(defaults).rstrip("\n"),
            "```",
            "",
            "On the command line, as with any other key of the config:",
            "",
            "```bash",
            "tune run --nproc_per_node 2 adaptive_full_finetune_distributed --config tiny/full \\",
            f"    {EXAMPLES['adaptive.global_batch_size']}",
            "```",
            "",
            "## The keys",
            "",
            *(line for key in CONFIG_KEYS for line in _section(key)),
            *_growth_functions(),
        ]
    )


def allowed(key: ConfigKey) -> str:
    """The values that ``key`` may have, in the words of the errors for wrong values."""
    rules = list(dict.fromkeys(_rule(key, value) for value in _WRONG_VALUES))
    takes_null = key.default is None and not any("null" in rule for rule in rules)
    return ", ".join(rules) + (", or null" if takes_null else "")


def command_line() -> str:
    """The page of all commands of ``tune-adaptive``."""
    program = _parser()
    commands = commands_of(program)
    lines = [
        "# Command line",
        "",
        "<!-- generated from the parsers of tune-adaptive: make reference -->",
        "",
        *_prose(program.description),
        "| command | what it does |",
        "|---|---|",
        *(
            f"| [`{program.prog} {one.dest}`](#{program.prog}-{one.dest}) | {_cell(one.help)} |"
            for one in _helps(commands)
        ),
        "",
        *_options(program),
        *_prose(program.epilog),
    ]
    for helped in _helps(commands):
        command = commands.choices[helped.dest]
        lines += [f"## `{program.prog} {helped.dest}`", "", *_prose(command.description or _sentence(helped.help))]
        lines += [*_options(command), *_prose(command.epilog)]
    return "\n".join(lines).rstrip("\n") + "\n"


PAGES = {
    REPOSITORY / "docs" / "configuration.md": configuration,
    REPOSITORY / "docs" / "command_line.md": command_line,
}


def _section(key: ConfigKey) -> list[str]:
    example = OmegaConf.from_dotlist(EXAMPLES[key.path].split())
    AdaptiveSettings.from_cfg(example)  # raises if the example is wrong
    return [
        f"### `{key.path}`",
        "",
        _sentence(key.description),
        "",
        f"Values: {_marked(allowed(key))}. Default: `{_written(key.default)}`. Example:",
        "",
        "```yaml",
        OmegaConf.to_yaml(example).rstrip("\n"),
        "```",
        "",
    ]


def _rule(key: ConfigKey, value: Any) -> str:
    """The rule by which ``value`` is refused for ``key``, from "`margin` must be in [0, 1), but is -1 instead."."""
    cfg = OmegaConf.create({})
    OmegaConf.update(cfg, key.path, value)
    try:
        AdaptiveSettings.from_cfg(cfg)
    except InputError as refusal:
        return str(refusal).partition(" must be ")[2].partition(", but is ")[0].removeprefix("one of ")
    raise ValueError(f"{key.path} takes {value!r}, by which no rule can be seen.")


def _growth_functions() -> Iterator[str]:
    """What a config may name as its ``batch_increase_function``."""
    yield from (
        "## Growth functions",
        "",
        "`batch_increase_function` may name one of these, or a function of yours.",
        "",
    )
    yield from ("| `_component_` | arguments | what it does |", "|---|---|---|")
    for name in schedule.__all__:
        function = getattr(schedule, name)
        arguments = ", ".join(
            f"`{one.name}`" if one.default is one.empty else f"`{one.name}={one.default}`"
            for one in inspect.signature(function).parameters.values()
        )
        promise = (inspect.getdoc(function) or "").partition("\n\n")[0]
        yield f"| `{schedule.__name__}.{name}` | {arguments} | {_cell(' '.join(promise.split()))} |"
    yield ""


def commands_of(parser: argparse.ArgumentParser) -> Any:
    """The commands of a parser, as argparse has them."""
    return next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))


def _helps(commands: Any) -> list[argparse.Action]:
    """Name and help of each command."""
    return commands._choices_actions


def _options(parser: argparse.ArgumentParser) -> list[str]:
    shown = [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
    ]
    if not shown:
        return []
    rows = [f"| {_names(action)} | {_meaning(action, parser.prog)} |" for action in shown]
    return ["| option | meaning |", "|---|---|", *rows, ""]


def _names(action: argparse.Action) -> str:
    placeholder = action.metavar if isinstance(action.metavar, str) else action.dest
    if not action.option_strings:
        return f"`{placeholder}`"
    *others, last = action.option_strings
    value = "" if action.nargs == 0 else f" {placeholder if action.metavar else action.dest.upper()}"
    return ", ".join(f"`{name}`" for name in (*others, last + value))


def _meaning(action: argparse.Action, prog: str) -> str:
    text = (action.help or "") % (vars(action) | {"prog": prog})
    return _cell(text + (" (required)" if action.required and action.option_strings else ""))


def _prose(text: str | None) -> list[str]:
    """A help text as Markdown. Commands that are indented below a line are a block, other lines there are a list."""
    lines: list[str] = []
    for paragraph in textwrap.dedent(text or "").strip("\n").split("\n\n"):
        indented = [line for line in paragraph.splitlines() if line.startswith(" ")]
        others = [line for line in paragraph.splitlines() if not line.startswith(" ")]
        if not any(others + indented):
            continue
        if indented:
            lines += [_upper(others[0]), ""] if others else []
            block = textwrap.dedent("\n".join(indented))
            lines += ["```bash", block, "```", ""] if block.startswith("tune") else [*_items(block), ""]
        else:
            lines += [*others, ""]
    return lines


def _items(block: str) -> list[str]:
    """A list in Markdown, of lines with a word and its meaning. A line that is indented belongs to the one before.

    >>> _items("0   done\\n75  ended,\\n    and saved")
    ['- `0`: done', '- `75`: ended, and saved']
    """
    lines = re.sub(r"\n +", " ", block).splitlines()
    return [f"- `{word}`: {meaning.strip()}" for word, _, meaning in (line.partition(" ") for line in lines)]


def _upper(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _sentence(text: str | None) -> str:
    """``text`` as a sentence of its own. A value or a name at its beginning stays as it is."""
    marked = _marked((text or "").rstrip("."))
    return f"{marked if marked.partition(' ')[0].endswith(':') else _upper(marked)}."


def _marked(text: str | None) -> str:
    """``text`` with names of code marked as such.

    >>> _marked("a _component_, as in f(epoch) or `max_size`")
    'a `_component_`, as in `f(epoch)` or `max_size`'
    """
    return _NAME.sub(r"`\g<0>`", (text or "").replace("``", "`"))


def _cell(text: str | None) -> str:
    return _marked(text).replace("|", "\\|")


def _written(value: object) -> str:
    """A default as YAML writes it."""
    return "null" if value is None else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pages."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    for path, content in PAGES.items():
        path.write_text(content())


if __name__ == "__main__":
    main()
