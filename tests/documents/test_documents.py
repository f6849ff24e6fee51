"""The documents are right: links lead somewhere, programs run, commands and configs are accepted."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from scripts.site_pages import file_linked, link_targets
from tests.support.checkout import REPOSITORY, environment
from tests.support.document_commands import (
    PageCommands,
    WrongCommand,
    commands,
)
from tests.support.document_names import document_names
from tests.support.documents import DOCUMENTS, OUTPUT, Block, anchors, blocks, name_of
from torchtune_adaptive.settings import AdaptiveSettings

# The changelog describes earlier versions.
PRESENT = [document for document in DOCUMENTS if document.name != "CHANGELOG.md"]
documents = pytest.mark.parametrize("document", PRESENT, ids=name_of)


# ---- links


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading_of_it(document: Path) -> None:
    broken = []
    for target in link_targets(document.read_text()):
        path, _, anchor = target.partition("#")
        linked = file_linked(name_of(document), path) if path else name_of(document)
        if re.match(r"\w+:", target):
            continue
        if linked is None or (anchor and anchor not in anchors(REPOSITORY / linked)):
            broken.append(target)
    assert broken == []


# ---- blocks


@pytest.mark.slow
@pytest.mark.parametrize("document", [one for one in PRESENT if blocks(one, "python")], ids=name_of)
def test_the_python_of_a_document_runs(document: Path, group_of_one: None) -> None:
    names = document_names()
    for block in blocks(document, "python"):
        exec(compile("\n" * block.line + block.text, str(document), "exec"), names)


@documents
def test_the_yaml_and_json_of_a_document_can_be_read_and_its_keys_are_accepted(document: Path) -> None:
    for block in blocks(document, "json"):
        json.loads(block.text)
    for block in blocks(document, "yaml"):
        content = yaml.safe_load(block.text)
        assert isinstance(content, dict), block
        AdaptiveSettings.from_cfg(OmegaConf.create(content))


# ---- commands


@pytest.mark.parametrize("document", [one for one in PRESENT if blocks(one, "bash")], ids=name_of)
def test_the_commands_of_a_document_would_be_accepted(document: Path) -> None:
    page = PageCommands()
    for block in blocks(document, "bash"):
        for words in commands(block.text):
            page.check(words)


FULL = "tune run --nproc_per_node 2 adaptive_full_finetune_distributed --config"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f"{FULL} tiny/gone", "`--config` must be the name or path of a config, but is 'tiny/gone' instead"),
        (f"{FULL} tiny/full adaptive.margn=0.1", "did you mean `adaptive.margin`?"),
        (f"{FULL} tiny/lora", "does not train by tiny/lora, which is for lora_finetune"),
        ("tune-adaptive plan --config tiny/full --seq-len 4k", "`--seq-len` must be an integer, but is '4k' instead."),
        ("make gone", "the Makefile has no target gone"),
        ("rm -rf /", "no check is for `rm`"),
    ],
)
def test_a_wrong_command_is_found(line: str, why: str) -> None:
    (words,) = commands(line)
    with pytest.raises(WrongCommand) as wrong:
        PageCommands().check(words)
    assert why in str(wrong.value)


# ---- commands that are run


def output_after(block: Block) -> str:
    """The output that a document shows for ``block``: the block of output after it, in the same section."""
    following = [one for one in blocks(block.document) if one.line > block.line][:1]
    return "".join(one.text for one in following if one.language in OUTPUT and one.heading == block.heading)


def missing_lines(shown: str, printed: str) -> list[str]:
    """The lines of ``shown`` that ``printed`` lacks in this order; numbers may differ, and ``...`` matches anything."""

    def shape(line: str) -> str:
        return re.sub(r"\s+", " ", re.sub(r"-{2,}", "--", re.sub(r"\d[\d.,]*", "#", line))).strip()

    left = iter([shape(line) for line in re.split(r"[\r\n]+", printed)])
    patterns = {
        line: ".*".join(map(re.escape, shape(line).split("..."))) for line in shown.splitlines() if line.strip()
    }
    return [line for line, pattern in patterns.items() if not any(re.search(pattern, one) for one in left)]


class Shell:
    """Runs commands of a document in their own folder, which also replaces `/tmp`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def here(self, text: str) -> str:
        return text.replace("/tmp/", f"{self._folder}/")

    def run(self, words: Sequence[str], cfg: DictConfig | None) -> str:
        """Run a command, which trains by ``cfg`` if that is given, and return what it prints."""
        places = {} if cfg is None else {name: cfg[name] for name in ("tiny_dir", "output_dir")}
        given = {word.partition("=")[0] for word in words}
        moved = [f"{name}={place}" for name, place in places.items() if name not in given]
        ran = subprocess.run(
            [self.here(word) for word in (*words, *moved)],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        assert ran.returncode == 0, f"{shlex.join(words)}: {ran.stdout[-3000:]}"
        return ran.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("document", [one for one in PRESENT if blocks(one, "bash")], ids=name_of)
def test_the_commands_of_a_document_do_what_it_shows(document: Path, tiny_dir: Path, tmp_path: Path) -> None:
    """Runs the commands that need no GPU, no download and no large model, in their order."""
    page, shell = PageCommands(), Shell(tmp_path)
    for block in blocks(document, "bash"):
        printed: list[str] = []
        for words in commands(block.text):
            page.check(words)
            if page.runs:
                assets = None if page.cfg is None else Path(shell.here(page.cfg.tiny_dir))
                if assets is not None and not assets.exists():
                    assets.symlink_to(tiny_dir)
                printed.append(shell.run(words, page.cfg))
                print(f"{block}: ran {shlex.join(words)}")
        if page.runs:
            assert missing_lines(output_after(block), "\n".join(printed)) == [], block
