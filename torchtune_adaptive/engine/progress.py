"""Progress bars: tqdm's, which show nothing where it is not installed."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class _Silent:
    """Iterates without output, and accepts any other method of tqdm."""

    def __init__(self, iterable: Iterable[Any] = (), **_: Any) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self._iterable)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def __enter__(self) -> "_Silent":
        return self

    def __exit__(self, *_: object) -> None: ...


Bar: Any = _Silent
try:
    from tqdm import tqdm
except ImportError:
    pass
else:
    Bar = tqdm
