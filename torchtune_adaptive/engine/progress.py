"""Progress bars: tqdm's, which show nothing where it is not installed, or where its output cannot be written."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

_LOST = (OSError, ValueError, AttributeError)  # the output is full, closed, or None


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

    class _Tolerant(tqdm):
        """tqdm's bar. From the first error of its output on, it shows nothing."""

        @staticmethod
        def status_printer(file: Any) -> Any:
            try:
                return tqdm.status_printer(file)
            except _LOST:
                return lambda _: None

        def display(self, *args: Any, **options: Any) -> Any:
            return self._unless_lost(super().display, *args, **options)

        def close(self) -> None:
            self._unless_lost(super().close)

        def _unless_lost(self, show: Callable[..., Any], *args: Any, **options: Any) -> Any:
            try:
                return show(*args, **options)
            except _LOST:
                self.disable = True

    Bar = _Tolerant
