"""Progress bars, which show nothing where tqdm is not installed."""

from collections.abc import Iterable, Iterator
from typing import Any


class _Silent:
    """The part of tqdm that is used here, without output."""

    def __init__(self, iterable: Iterable[Any] = (), **_: Any) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self._iterable)

    def update(self, n: int = 1) -> None: ...

    def set_description(self, desc: str) -> None: ...

    def set_postfix_str(self, s: str) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> "_Silent":
        return self

    def __exit__(self, *_: object) -> None: ...


_Base: Any = _Silent
try:
    from tqdm import tqdm
except ImportError:
    pass
else:
    _Base = tqdm


class Bar(_Base):
    """A ``tqdm`` without its monitor thread, whose stack needs 8 MiB of memory that the system may limit."""

    monitor_interval = 0
