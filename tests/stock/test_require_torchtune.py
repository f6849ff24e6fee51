"""Without the packages of the extra `torchtune`, a recipe and the program end with one sentence per machine."""

import os
import subprocess
import sys

import pytest

WITHOUT = "import sys; sys.modules.update(dict.fromkeys({missing!r})); "
SENTENCE = (
    "torchtune_adaptive: the recipes and `tune-adaptive` need packages that are not installed ({missing}):"
    " `pip install 'torchtune-adaptive[torchtune]'` installs them.\n"
)
PROGRAMS = {
    "recipe": "import runpy; runpy.run_module('adaptive_full_finetune_distributed', run_name='__main__')",
    "tune-adaptive": "from torchtune_adaptive.cli import main; main()",
}


def end(program: str, missing: list[str], local_rank: int) -> tuple[int, str, str]:
    """Exit status and output of a program for which packages are missing."""
    code = WITHOUT.format(missing=missing) + PROGRAMS[program]
    environment = os.environ | {"LOCAL_RANK": str(local_rank)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    return run.returncode, run.stdout, run.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_missing_is_named_in_one_sentence_on_the_first_rank(program: str) -> None:
    missing = ["torchtune", "torchao", "omegaconf"]
    assert end(program, missing, 0) == (1, "", SENTENCE.format(missing=", ".join(missing)))
    assert end(program, missing[-1:], 0) == (1, "", SENTENCE.format(missing="omegaconf"))
    assert end(program, missing, 1) == (1, "", "")
