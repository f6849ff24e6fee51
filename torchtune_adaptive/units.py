"""Bytes as text, at the moment of printing."""


def format_bytes(num_bytes: float) -> str:
    """``num_bytes`` with the binary unit that keeps the number readable.

    >>> format_bytes(1536), format_bytes(80 * 2**30)
    ('1.5 KiB', '80.0 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.1f} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
