"""A checkpoint from somebody else is loaded, or refused in one sentence; code that it names is not run."""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from tests.training.checkpoints.test_step_checkpoints import ADAMW, Run
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training.checkpoints.folder import RANK_STATES_NAME, read_rank_states
from torchtune_adaptive.training.checkpoints.reading import TensorReader, TensorsOnly

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.train(1)
    assert run.save(1)
    return run


def test_code_in_the_metadata_is_not_run(run: Run, tmp_path: Path) -> None:
    checkpoint = run.folder.checkpoints()[-1]
    metadata = checkpoint.path / ".metadata"
    saved = pickle.loads(metadata.read_bytes())
    saved.planner_data = Calls(os.mkdir, str(tmp_path / "made"))
    metadata.write_bytes(hostile := pickle.dumps(saved))
    before = run.tensors()
    name = re.escape(f"{os.mkdir.__module__}.mkdir")
    with pytest.raises(InputError, match=rf"cannot be read: .*{name} does not belong into a .* metadata\.$"):
        run.steps.load(checkpoint, config=ADAMW)
    assert not (tmp_path / "made").exists()
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.tensors().items())
    pickle.loads(hostile)  # what torch itself does
    assert (tmp_path / "made").exists()


def test_code_in_the_states_of_ranks_is_not_run(tmp_path: Path) -> None:
    torch.save([Calls(os.mkdir, str(tmp_path / "made"))], tmp_path / RANK_STATES_NAME)
    with pytest.raises(InputError, match=r"cannot be read: .*\.$"):
        read_rank_states(tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "os.mkdir"),
        ("torch.distributed.checkpoint.metadata", "field"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemReader"),
        ("builtins", "eval"),
    ],
)
def test_other_names_of_the_same_modules_are_refused_too(tmp_path: Path, module: str, name: str) -> None:
    reference = (
        b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"
    )
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + reference + b".")
    with pytest.raises(pickle.UnpicklingError, match=f"^{re.escape(module)}.{re.escape(name)} does not belong"):
        TensorReader(tmp_path).read_metadata()


def test_a_checkpoint_of_an_early_python_3_11_is_read(tmp_path: Path) -> None:
    """Python 3.11.0 to 3.11.3 write a member of an enumeration so."""
    written = Metadata({}, planner_data=Calls(getattr, _MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT"))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(written))
    found = TensorReader(tmp_path).read_metadata()
    assert found.planner_data is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT


@pytest.mark.parametrize("owner", [_MEM_FORMAT_ENCODING, Metadata])
def test_an_attribute_that_is_no_member_of_an_enumeration_is_refused(tmp_path: Path, owner: Any) -> None:
    written = Metadata({}, planner_data=Calls(getattr, owner, "__init__"))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(written))
    with pytest.raises(pickle.UnpicklingError, match=r"^__init__ of <.*> does not belong into a .* metadata$"):
        TensorReader(tmp_path).read_metadata()


def test_code_in_the_place_of_a_tensor_is_not_run(tmp_path: Path) -> None:
    saved = {"weight": Calls(os.mkdir, str(tmp_path / "made"))}
    state_dict_saver.save(saved, storage_writer=FileSystemWriter(tmp_path / "saved"), no_dist=True)
    reader = TensorReader(tmp_path / "saved")
    assert isinstance(reader.read_metadata().state_dict_metadata["weight"], BytesStorageMetadata)
    with pytest.raises(BaseException, match="weight is no tensor"):
        load({"weight": torch.zeros(3)}, storage_reader=reader, planner=TensorsOnly(), no_dist=True)
    assert not (tmp_path / "made").exists()
    load({"weight": torch.zeros(3)}, storage_reader=FileSystemReader(tmp_path / "saved"), no_dist=True)
    assert (tmp_path / "made").exists()
