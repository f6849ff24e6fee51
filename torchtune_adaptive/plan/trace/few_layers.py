"""Build a config's model with only a few of its layers."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

from torchtune_adaptive.errors import InputError, quote, reason_of, require_integer


@contextmanager
def layers_limited_to(num_layers: int | None, component: str) -> Iterator[list[int]]:
    """Context: ``component`` builds only ``num_layers`` layers (None: all). Yields a list that gets the true number.

    A config names a whole model, such as ``llama3_1_70b``, which calls one of torchtune's builders with its number of
    layers. In this context each builder appends that number to the list and builds ``num_layers`` instead.
    """
    _import_builders(component)
    true_counts: list[int] = []

    def limited(builder: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(builder)

        @functools.wraps(builder)
        def build(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            true_counts.append(require_integer("num_layers", bound.arguments["num_layers"], minimum=1))
            bound.arguments["num_layers"] = num_layers or bound.arguments["num_layers"]
            return builder(*bound.args, **bound.kwargs)

        return build

    with ExitStack() as stack:
        for module, name, builder in list(_builders()):
            stack.enter_context(mock.patch.object(module, name, limited(builder)))
        yield true_counts


def _builders() -> Iterator[tuple[ModuleType, str, Any]]:
    """Each function in torchtune's imported models that builds layers of text, with its module and name."""
    taken = {"num_layers", "vocab_size"}
    for module_name, module in sys.modules.items():
        if module_name.startswith("torchtune.models."):
            for key, value in vars(module).items():
                if inspect.isfunction(value) and taken <= inspect.signature(value).parameters.keys():
                    yield module, key, value


def _import_builders(component: str) -> None:
    """Import the modules of a torchtune ``component``.

    Raises:
        InputError: the import fails; the message says why.
    """
    try:
        _get_component_from_path(component)
    except InstantiationError as error:
        reason = reason_of(error.__cause__ or error)
        raise InputError(f"`model` {quote(component)} cannot be imported: {reason}.") from error
