"""Follow tensor storages from the first operation that returns them until they are freed."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from torchtune_adaptive.engine.memory.operations import OperationMode


class Storages:
    """Reports every change in the size of the storages that it has seen.

    Args:
        on_change: called as ``on_change(number, change_bytes)``. The number identifies the storage and is never
            reused. When a storage is freed, the call comes from the thread that dropped its last reference.
    """

    def __init__(self, on_change: Callable[[int, int], None]) -> None:
        self._on_change = on_change
        self._seen: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}
        self._last_number = 0

    def see(self, storage: torch.UntypedStorage) -> int:
        """Count ``storage`` at its current size, and return its number."""
        key = storage._cdata
        if key not in self._seen:
            self._last_number += 1
            self._seen[key] = (self._last_number, 0, weakref.ref(storage, lambda _: self._forget(key)))
        number, counted_bytes, reference = self._seen[key]
        nbytes = storage.nbytes()
        if nbytes != counted_bytes:
            self._seen[key] = (number, nbytes, reference)
            self._on_change(number, nbytes - counted_bytes)
        return number

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._seen

    def see_again(self) -> None:
        """Count all storages again, because they may have been resized unseen."""
        for _, _, reference in list(self._seen.values()):
            storage = reference()
            if storage is not None:
                self.see(storage)

    def _forget(self, key: int) -> None:
        number, counted_bytes, _ = self._seen.pop(key)
        self._on_change(number, -counted_bytes)


class WatchOperations(OperationMode):
    """Reports every operation on plain tensors, and every resize of a storage.

    No dispatch mode sees ``UntypedStorage.resize_``, so this mode patches it while it is active. Delete the patch
    when FSDP2 allocates its gathered parameters by an operation.

    Args:
        after_operation: called as ``after_operation(func, inputs, outputs)``; ``inputs`` is ``(args, kwargs)``.
        after_resize: called as ``after_resize(storage)``.
    """

    def __init__(
        self, after_operation: Callable[[Any, Any, Any], None], after_resize: Callable[[torch.UntypedStorage], None]
    ) -> None:
        super().__init__()
        self._after_operation = after_operation
        self._after_resize = after_resize
        self._resizes: list[Any] = []

    def __enter__(self) -> "WatchOperations":
        resize, after_resize = torch.UntypedStorage.resize_, self._after_resize

        def resize_and_report(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            after_resize(storage)
            return result

        self._resizes.append(resize)
        torch.UntypedStorage.resize_ = resize_and_report  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        torch.UntypedStorage.resize_ = self._resizes.pop()
        super().__exit__(kind, error, traceback)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = func(*args, **kwargs)
        self._after_operation(func, (args, kwargs), outputs)
        return outputs
