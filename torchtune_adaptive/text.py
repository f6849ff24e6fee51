"""Format figures for printing: bytes, tables, lists of ranks. Read sizes of memory."""

import math
import re
from collections.abc import Collection, Sequence
from fractions import Fraction

from torchtune_adaptive.errors import InputError, as_integer, quote

_MEMORY_TEXT = re.compile(r"\s*(-?)([0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})\s*([a-z]*)\s*", re.IGNORECASE)
_BYTES_PER_UNIT = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}


def format_bytes(num_bytes: float) -> str:
    """``num_bytes`` with a suitable binary unit.

    >>> format_bytes(1536), format_bytes(80 * 2**30)
    ('1.5 KiB', '80.0 GiB')
    """
    unit, size = byte_unit(abs(num_bytes))
    return f"{num_bytes:.0f} B" if size == 1 else f"{num_bytes / size:.1f} {unit}"


def parse_memory(value: object) -> int:
    """Bytes, from whole bytes or a text with a unit; KiB to TiB are binary, KB to TB decimal.

    Raises:
        InputError: the value cannot be read, or is not above zero.

    >>> parse_memory("1.5GiB"), parse_memory("80 gb"), parse_memory(1024)
    (1610612736, 80000000000, 1024)
    """
    whole = int(value) if isinstance(value, float) and value.is_integer() else as_integer(value)
    match = _MEMORY_TEXT.fullmatch(value) if isinstance(value, str) else None
    if match and match[3].lower() in _BYTES_PER_UNIT:
        size = Fraction(match[2]) * _BYTES_PER_UNIT[match[3].lower()]
        whole = math.floor(-size if match[1] else size)
    if whole is None:
        hint = f"; did you mean `{meant}`?" if (meant := size_meant(value)) else "."
        raise InputError(
            f"`memory_limit` must be a size like 80GiB or whole bytes, but is {quote(value)} instead{hint}"
        )
    if whole <= 0:
        raise InputError(f"`memory_limit` must be at least one byte, but is {quote(value)} instead.")
    return whole


def size_meant(value: object) -> str:
    """The size that somebody probably means who leaves out its unit or the end of it, or "".

    >>> size_meant("24G"), size_meant("24"), size_meant("H100"), size_meant("24.5.6G")
    ('24GiB', '24GiB', '', '')
    """
    match = _MEMORY_TEXT.fullmatch(str(value))
    if not match or match[1] or match[3].lower() not in ("", *"kmgt"):
        return ""
    return f"{match[2]}{match[3].upper() or 'G'}iB"


def byte_unit(num_bytes: float) -> tuple[str, int]:
    """The binary unit for figures up to ``num_bytes``, with its bytes.

    >>> byte_unit(80 * 2**30), byte_unit(2**20 - 1)
    (('GiB', 1073741824), ('KiB', 1024))
    """
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    return next(((name, size) for name, size in units.items() if num_bytes >= size), ("B", 1))


def text_table(rows: Sequence[Sequence[str]], *, num_names: int = 0) -> str:
    """A table with aligned columns. The first row is the header.

    The first ``num_names`` columns hold text and are left-aligned. The others hold figures and are right-aligned.

    >>> print(text_table([["size", "fits"], ["16", "no"]]))
    size  fits
    ----  ----
      16    no
    >>> print(text_table([["GPU", "rows"], ["H100", "8"]], num_names=1))
    GPU   rows
    ----  ----
    H100     8
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    lines = [
        "  ".join(
            cell.ljust(width) if column < num_names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def count_text(number: int, noun: str) -> str:
    """The number and what it counts.

    >>> count_text(1, "step"), count_text(2000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ranks_text(ranks: Collection[int]) -> str:
    """The ranks as text: "rank 1" or "ranks 0, 2".

    >>> ranks_text([1]), ranks_text([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
