"""What a search found, for later runs."""

from dataclasses import asdict, dataclass, fields
from typing import Any

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class FoundSize:
    """What a search found.

    Attributes:
        exact_batch_size, batch_size, forecast_rows: as in ``SearchResult``.
        fitting_rows, token_budget, tokens_per_second: as in ``Sizes``.
        memory_limit_bytes: the least that a rank could use, including the margin.
    """

    exact_batch_size: int
    batch_size: int
    fitting_rows: int
    memory_limit_bytes: int
    forecast_rows: float | None
    token_budget: int | None
    tokens_per_second: dict[int, float] | None

    def __post_init__(self) -> None:
        """Refuse what no search can have found, as a damaged file may hold it.

        Raises:
            TypeError: a size is no number.
            ValueError: the sizes contradict each other.
        """
        if not 1 <= self.fitting_rows <= self.batch_size <= self.exact_batch_size or self.memory_limit_bytes < 1:
            raise ValueError(f"no sizes that a search finds: {self}")
        if self.tokens_per_second == {}:
            raise ValueError(f"no rates: {self}")
        for name, kind in (("forecast_rows", int | float), ("token_budget", int)):
            if not isinstance(getattr(self, name), kind | None):
                raise TypeError(f"{name} is no number: {self}")
        for name in ("exact_batch_size", "batch_size", "fitting_rows", "memory_limit_bytes"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name} is not an integer: {self}")

    def as_json(self) -> dict[str, Any]:
        """What ``from_json`` reads."""
        return {"format": _FORMAT} | asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> "FoundSize":
        """What ``as_json`` gave.

        Raises:
            TypeError, ValueError, LookupError: it did not give this.
        """
        if content["format"] != _FORMAT:
            raise ValueError(f"`format` must be {_FORMAT}, but is {content['format']!r} instead.")
        values = {field.name: content[field.name] for field in fields(cls)}
        if (rates := values["tokens_per_second"]) is not None:
            values["tokens_per_second"] = {int(size): float(rate) for size, rate in dict(rates).items()}
        return cls(**values)
