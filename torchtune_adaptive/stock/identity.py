"""Which run this is, and which frozen weights it trains on: they are in no checkpoint."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from omegaconf import DictConfig
from torchtune.training.checkpointing import FormattedCheckpointFiles

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, reason_of
from torchtune_adaptive.stock.configs import resolved
from torchtune_adaptive.stock.load import is_of_stock
from torchtune_adaptive.stock.resume import content_digest, stock_checkpoint
from torchtune_adaptive.training.checkpoints.digests import digests_of
from torchtune_adaptive.training.checkpoints.folder import Checkpoint, CheckpointFolder
from torchtune_adaptive.training.run_state import RunIdentity

_TRAINED = "checkpointer"  # which also reads the frozen weights of the trained model, such as LoRA's base
# Checkpointers of other models that are not trained, by method.
_OTHERS = {
    "full_dpo": ("ref_checkpointer",),
    "knowledge_distillation": ("teacher_checkpointer",),
    "ppo_full_finetune": ("ref_policy_checkpointer", "reward_checkpointer"),
}


def method_of_recipe(recipe: type) -> str:
    """The name of the stock recipe that ``recipe`` extends, without its kind of device.

    >>> class FullFinetuneRecipeDistributed: __module__ = "torchtune_adaptive._stock.full_finetune_distributed"
    >>> method_of_recipe(FullFinetuneRecipeDistributed)
    'full_finetune'
    """
    name = next(filter(is_of_stock, recipe.__mro__)).__module__.rpartition(".")[2]
    return name.removesuffix("_distributed").removesuffix("_single_device")


def identity(
    cfg: DictConfig,
    method: str,
    resumed: Checkpoint | None,
    folder: CheckpointFolder,
    consensus: Consensus,
    *,
    has_frozen: bool,
) -> RunIdentity:
    """The identity of the run that ``cfg`` has set up: a new one, or that of ``resumed``. A collective.

    Args:
        cfg: the config with which the recipe was set up.
        has_frozen: whether the trained model has weights that are not trained.

    Raises:
        InputError: ``resumed`` was trained on other frozen weights; on all ranks.
    """

    def make() -> RunIdentity:
        files = _files(cfg, [*([_TRAINED] if has_frozen else []), *_OTHERS.get(method, ())])
        if resumed is None or resumed.state is None:
            stock = stock_checkpoint(folder.path, in_background=False) if resumed is None else None
            return RunIdentity(uuid4().hex, method, _digests(files), "" if stock is None else content_digest(stock))
        before = resumed.state.run
        kept: dict[str, dict[str, str]] = {}
        if _TRAINED in before.frozen and _holds_the_model(cfg, resumed):
            files.pop(_TRAINED, None)
            kept[_TRAINED] = before.frozen[_TRAINED]
        frozen = kept | _digests(files)
        for name, digests in before.frozen.items():
            _check_same(name, digests, frozen.get(name, {}), resumed)
        return replace(before, frozen=frozen)

    return consensus.ask_rank_zero(make)


def _files(cfg: DictConfig, checkpointers: Iterable[str]) -> dict[str, list[Path]]:
    """The files that each of ``checkpointers`` reads."""
    found: dict[str, list[Path]] = {}
    content = resolved(cfg)
    for name in checkpointers:
        block = content.get(name)
        names: Any = block.get("checkpoint_files") if isinstance(block, dict) else None
        if isinstance(names, dict):
            names = FormattedCheckpointFiles.from_dict(names).build_checkpoint_filenames()
        if isinstance(block, dict) and isinstance(names, list):
            found[name] = [Path(str(block.get("checkpoint_dir", "")), str(one)).absolute() for one in names]
    return found


def _holds_the_model(cfg: DictConfig, resumed: Checkpoint) -> bool:
    """Whether the run has read the whole model from the checkpoint instead of its base."""
    files = _files(cfg, [_TRAINED]).get(_TRAINED, [])
    return bool(files) and all(file.parent == resumed.path.absolute() for file in files)


def _digests(files: Mapping[str, list[Path]]) -> dict[str, dict[str, str]]:
    """The digest of each file, by its path, of each checkpointer."""
    found: dict[str, dict[str, str]] = {}
    for name, paths in files.items():
        try:
            found[name] = dict(zip(map(str, paths), digests_of(paths), strict=True))
        except OSError as error:
            raise InputError(f"`{name}.checkpoint_files` must be readable, but are not: {reason_of(error)}.") from error
    return found


def _check_same(name: str, before: Mapping[str, str], now: Mapping[str, str], resumed: Checkpoint) -> None:
    """Refuse files of another content. Their names and places may be others."""
    missing = next((file for file, digest in before.items() if digest not in now.values()), None)
    other = next((file for file, digest in now.items() if digest not in before.values()), None)
    if missing is None and other is None:
        return
    how = f"has {other!r} too"
    if missing is not None:
        how = f"lacks {missing!r}" if other is None else f"has {other!r} instead of {missing!r}"
    if missing == other:
        how = f"the content of {other!r} has changed since then"
    raise InputError(f"`{name}` must have the weights that {str(resumed.path)!r} was trained on, but {how}.")
