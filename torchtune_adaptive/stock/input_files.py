"""Files and folders that a config's tokenizers and checkpointers read."""

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.errors import InputError, quote
from torchtune_adaptive.stock.configs import resolved

# torchtune's blocks and arguments of such names read a local path. `output_dir` is written to.
_TOKENIZER, _CHECKPOINTER = "tokenizer", "checkpointer"
_PATH = re.compile(r"(?!output_dir$)(.*_)?(path|file|dir)")


def check_input_files(cfg: DictConfig) -> None:
    """Refuse a path that does not exist, of torchtune's tokenizers, and of its checkpointers unless the run resumes.

    Raises:
        InputError: it does not exist; the sentence names its key.
    """
    kinds = (_TOKENIZER,) if cfg.get("resume_from_checkpoint", False) else (_TOKENIZER, _CHECKPOINTER)
    for name, block in resolved(cfg).items():
        if name.endswith(kinds) and isinstance(block, dict) and _is_of_torchtune(block):
            _check_block(name, block)


def _is_of_torchtune(block: dict[str, Any]) -> bool:
    return str(block.get("_component_")).startswith("torchtune.")


def _check_block(name: str, block: dict[str, Any]) -> None:
    for key, value in block.items():
        if _PATH.fullmatch(key) and isinstance(value, str) and not Path(value).exists():
            raise InputError(f"`{name}.{key}` must exist, but is {quote(value)} instead.")
    folder, files = block.get("checkpoint_dir"), block.get("checkpoint_files")
    if not isinstance(folder, str) or not isinstance(files, list):
        return  # torchtune also takes a mapping, which describes the files' names
    for file in files:
        if isinstance(file, str) and not Path(folder, file).exists():
            raise InputError(
                f"`{name}.checkpoint_files` must be files of {quote(folder)}, but {quote(file)} is not one."
            )
