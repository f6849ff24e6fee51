"""Reads PyTorch's distributed checkpoints without running code from them. torch itself unpickles whatever they have."""

import enum
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

# Of other modules than that of the metadata's own classes.
_ALSO_ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # of Python 3.13
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.serialization", "_get_layout"),
}


class TensorReader(FileSystemReader):
    """Reads the metadata of tensors, in which nothing else than their description may be."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The metadata of all ranks.

        Raises:
            pickle.UnpicklingError: there is something else in the file.
        """
        with (Path(self.path) / ".metadata").open("rb") as file:
            return _MetadataUnpickler(file).load()


class TensorsOnly(DefaultLoadPlanner):
    """Loads tensors alone. torch would unpickle any other value, and run the code that it names."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is no tensor")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        """As the base class does, for the classes of a checkpoint's metadata."""
        found = None
        if (module_name, global_name) in _ALSO_ALLOWED:
            found = super().find_class(module_name, global_name)
        elif module_name == metadata.__name__:
            one = vars(metadata).get(global_name)
            found = one if getattr(one, "__module__", "") == module_name else None
        elif module_name == "torch" and isinstance(one := vars(torch).get(global_name), torch.dtype):
            found = one
        elif (module_name, global_name) == ("builtins", "getattr"):
            found = _member
        if found is None:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} does not belong into a checkpoint's metadata")
        return found


# Python 3.11.0 to 3.11.3 wrote a member of an enumeration as an attribute of its class.
def _member(kind: Any, name: str) -> Any:
    found = kind.__members__.get(name) if isinstance(kind, enum.EnumMeta) else None
    if found is None:
        raise pickle.UnpicklingError(f"{name} of {kind!r} does not belong into a checkpoint's metadata")
    return found
