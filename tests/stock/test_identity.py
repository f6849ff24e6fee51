"""A run keeps its identity, and is refused where its frozen weights have changed, wherever they are."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torchtune import training

from tests.support.toys import STATE
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.identity import identity
from torchtune_adaptive.stock.resume import content_digest, stock_checkpoint
from torchtune_adaptive.training.checkpoints.digests import digests_of
from torchtune_adaptive.training.checkpoints.folder import Checkpoint, CheckpointFolder
from torchtune_adaptive.training.run_state import RunIdentity


class Models:
    """A folder of weights for each checkpointer of a config."""

    def __init__(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        self.files = {
            "checkpointer": ["a-00001-of-00002.bin", "a-00002-of-00002.bin"],
            "ref_checkpointer": ["ref.bin"],
            "teacher_checkpointer": ["teacher.bin"],
            "reward_checkpointer": ["reward.bin"],
            "value_checkpointer": ["value.bin"],
        }
        for names in self.files.values():
            for name in names:
                (path / name).write_text(name)

    def cfg(self, **blocks: dict[str, Any]) -> Any:
        keys: dict[str, Any] = {
            name: {"checkpoint_dir": str(self.path), "checkpoint_files": names} for name, names in self.files.items()
        }
        changed = {name: keys[name] | block for name, block in blocks.items()}
        return OmegaConf.create({**keys, "optimizer": {"lr": 1}, **changed})

    def identity(
        self,
        *,
        resumed: Checkpoint | None = None,
        method: str = "lora_finetune",
        has_frozen: bool = True,
        cfg: Any = None,
    ) -> RunIdentity:
        folder = CheckpointFolder(self.path / "out")
        return identity(cfg or self.cfg(), method, resumed, folder, Consensus(), has_frozen=has_frozen)

    def checkpoint(self, run: RunIdentity) -> Checkpoint:
        return Checkpoint(self.path / "out" / "step_5", 1, replace(STATE, run=run), 0, is_of_step=True)

    def refusal(self, run: RunIdentity, **options: Any) -> str:
        with pytest.raises(InputError) as refused:
            self.identity(resumed=self.checkpoint(run), **options)
        return str(refused.value)


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


def test_a_new_run_has_a_new_id_and_a_resumed_one_keeps_it(models: Models) -> None:
    first, second = models.identity(), models.identity()
    assert first.id != second.id
    assert replace(first, id="") == replace(second, id="")
    assert models.identity(resumed=models.checkpoint(first)) == first


@pytest.mark.parametrize(
    ("method", "has_frozen", "read"),
    [
        ("full_finetune", False, []),
        ("full_finetune", True, ["checkpointer"]),  # with a part that is not trained
        ("lora_dpo", True, ["checkpointer"]),  # the reference is the policy without its adapters
        ("full_dpo", False, ["ref_checkpointer"]),
        ("knowledge_distillation", True, ["checkpointer", "teacher_checkpointer"]),
        ("ppo_full_finetune", False, ["reward_checkpointer"]),
    ],
)
def test_frozen_weights_are_those_that_a_method_reads_and_does_not_train(
    method: str, has_frozen: bool, read: list[str], models: Models
) -> None:
    """A config may have other checkpointers, which nobody reads."""
    for name in {*models.files} - {*read}:
        for file in models.files[name]:
            (models.path / file).unlink()
    frozen = models.identity(method=method, has_frozen=has_frozen).frozen
    assert [*frozen] == read
    for name in read:
        files = [models.path / file for file in models.files[name]]
        assert frozen[name] == dict(zip(map(str, files), digests_of(files), strict=True))


def test_files_may_have_another_place_name_and_order_and_be_described_by_a_pattern(models: Models) -> None:
    run = models.identity()
    other = Models(models.path / "moved")
    assert replace(other.identity(resumed=models.checkpoint(run)), frozen={}) == replace(run, frozen={})
    names = ["renamed.bin", "a-00001-of-00002.bin"]
    (models.path / "a-00002-of-00002.bin").rename(models.path / "renamed.bin")
    assert models.identity(resumed=models.checkpoint(run), cfg=models.cfg(checkpointer={"checkpoint_files": names}))
    (models.path / "renamed.bin").rename(models.path / "a-00002-of-00002.bin")
    pattern = {"filename_format": "a-{}-of-{}.bin", "max_filename": "00002"}
    assert models.identity(cfg=models.cfg(checkpointer={"checkpoint_files": pattern})).frozen == run.frozen


@pytest.mark.parametrize(
    ("method", "name", "change"),
    [
        ("lora_finetune", "a-00002-of-00002.bin", lambda content: bytes([content[0] ^ 1]) + content[1:]),
        ("full_dpo", "ref.bin", lambda content: content + b"1"),
        ("knowledge_distillation", "teacher.bin", lambda content: b""),
    ],
)
def test_frozen_weights_that_have_changed_are_refused_with_both_places(
    method: str, name: str, change: Callable[[bytes], bytes], models: Models
) -> None:
    run = models.identity(method=method)
    block = next(block for block, names in models.files.items() if name in names)
    other = Models(models.path / "other")
    (other.path / name).write_bytes(change((other.path / name).read_bytes()))
    begins = f"`{block}` must have the weights that '%s/out/step_5' was trained on, but "
    how = f"has '{other.path}/{name}' instead of '{models.path}/{name}'."
    assert other.refusal(run, method=method) == begins % other.path + how
    (models.path / name).write_bytes((other.path / name).read_bytes())
    how = f"the content of '{models.path}/{name}' has changed since then."
    assert models.refusal(run, method=method) == begins % models.path + how


def test_more_or_fewer_files_than_before_are_refused(models: Models) -> None:
    fewer = models.cfg(checkpointer={"checkpoint_files": ["a-00001-of-00002.bin"]})
    one, two = models.identity(cfg=fewer), models.identity()
    file = f"'{models.path}/a-00002-of-00002.bin'"
    assert models.refusal(two, cfg=fewer).endswith(f"was trained on, but lacks {file}.")
    assert models.refusal(one).endswith(f"was trained on, but has {file} too.")
    assert models.refusal(two, has_frozen=False).endswith(f", but lacks '{models.path}/a-00001-of-00002.bin'.")


def test_a_whole_model_from_an_epoch_needs_no_base_and_remembers_it(models: Models) -> None:
    run = models.identity()
    epoch = models.path / "out" / "epoch_0"
    epoch.mkdir(parents=True)
    (epoch / "model.bin").write_text("trained")
    (models.path / "a-00001-of-00002.bin").unlink()
    cfg = models.cfg(checkpointer={"checkpoint_files": [str(epoch / "model.bin")]})
    assert models.identity(resumed=replace(models.checkpoint(run), path=epoch), cfg=cfg) == run


def test_a_file_that_cannot_be_read_is_refused(models: Models) -> None:
    (models.path / "a-00001-of-00002.bin").unlink()
    with pytest.raises(InputError, match=r"`checkpointer\.checkpoint_files` must be readable, but are not: F"):
        models.identity()


def test_a_new_run_remembers_what_torchtune_has_left_in_its_folder(models: Models, tmp_path: Path) -> None:
    assert models.identity().stock_before == ""
    (tmp_path / "out" / "recipe_state").mkdir(parents=True)
    (tmp_path / "out" / "epoch_0").mkdir()
    torch.save({training.EPOCHS_KEY: 1}, tmp_path / "out" / "recipe_state" / "recipe_state.pt")
    stock = stock_checkpoint(tmp_path / "out", in_background=False)
    assert stock is not None
    assert models.identity().stock_before == content_digest(stock) != ""
    assert models.identity(resumed=stock).stock_before == ""  # it is the run's own
