"""Without the packages of the extra `torchtune`, a recipe and the program end with one sentence."""

import subprocess
import sys

import pytest

WITHOUT = "import sys; sys.modules.update(dict.fromkeys({missing!r})); "
SENTENCE = "{program}: Not installed: {missing}; `pip install 'torchtune-adaptive[torchtune]'` adds what is missing.\n"
PROGRAMS = {
    "recipe": "import runpy; runpy.run_module('adaptive_full_finetune_distributed', run_name='__main__')",
    "tune-adaptive": "from torchtune_adaptive.cli import main; main()",
}


def end(program: str, missing: list[str]) -> tuple[int, str, str]:
    """Exit status and output of a program for which packages are missing."""
    code = WITHOUT.format(missing=missing) + PROGRAMS[program]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return run.returncode, run.stdout, run.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_missing_is_named_in_one_sentence(program: str) -> None:
    missing = ["torchtune", "torchao", "omegaconf"]
    name = {"recipe": "-c"}.get(program, program)  # a program has the name of its file
    assert end(program, missing) == (1, "", SENTENCE.format(program=name, missing=", ".join(missing)))
