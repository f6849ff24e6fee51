"""Why a step cannot be traced, with the line of the user's code. It needs torch alone."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from torchtune_adaptive.errors import reason_of
from torchtune_adaptive.plan.trace.fake_step import CannotTraceError

_PACKAGE = Path(__file__).parents[2]
_STANDARD_LIBRARY = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
# How a `torch.library.custom_op` says that it has no fake implementation: by a plain RuntimeError.
_CUSTOM_OPERATION = re.compile(r"There was no fake impl registered for <CustomOpDef\((.*?)\)>")
_NO_KERNEL = "which has no fake implementation (`torch.library.register_fake`)"
_EXPERTS = "torch traces products of experts in bfloat16 alone, as with `dtype=bfloat16`"  # _meta_grouped_mm_common
_INSTALLED = ("site-packages", "dist-packages")


def why_untraceable(error: BaseException, *, has_read_values: bool = False) -> str:
    """Part of a sentence: which line of the user's code did what with tensors without values.

    Args:
        has_read_values: values were read that a trace does not know.
    """
    place, library_place = _places(error)
    known = ", after values were read, which a trace does not have" if has_read_values else ""
    what = _what(error, known)
    if not place:
        return f"{library_place} {what}" if library_place else what
    return f"{place} {what}{f' (in {library_place})' if library_place else ''}"


def _what(error: BaseException, known: str) -> str:
    if isinstance(error, CannotTraceError):
        return str(error)
    if isinstance(error, DynamicOutputShapeException):
        return f"calls {error.func}, whose result has a size that depends on values"
    if isinstance(error, DataDependentOutputException):
        return f"calls {error.func}, whose result depends on values"
    if isinstance(error, UnsupportedOperatorException):
        return f"calls {error.func}, {_NO_KERNEL}"
    if (operation := _CUSTOM_OPERATION.match(str(error))) is not None:
        return f"calls {operation[1]}, {_NO_KERNEL}"
    experts = f"; {_EXPERTS}" if str(error).startswith("Expected inputs of BF16 type") else ""
    return f"raised {reason_of(error)}{known}{experts}"


def _places(error: BaseException) -> tuple[str, str]:
    """File and line of the user's innermost function, and of the innermost library that it called, except torch.

    Either is "" if there is none.
    """
    user = library = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = frame.filename
        if path.startswith((*_STANDARD_LIBRARY, "<frozen")) and not any(name in path for name in _INSTALLED):
            continue
        if Path(path).is_relative_to(_PACKAGE):
            continue
        parts = Path(path).parts
        installed = next((parts.index(name) for name in _INSTALLED if name in parts), None)
        if installed is None:
            user, library = f"{_short(path)}:{frame.lineno}", ""
        elif parts[installed + 1] not in ("torch", "_pytest", "pluggy"):
            library = f"{'/'.join(parts[installed + 1 :])}:{frame.lineno}"
    return user, library


def _short(path: str) -> str:
    """The path relative to the working directory, if it lies there."""
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return path if relative.startswith(os.pardir) else relative
