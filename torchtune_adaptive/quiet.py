"""Filter messages of other libraries that a user can do nothing about."""

import logging
import warnings


def filter_messages() -> None:
    """Filter them in this process. torchao logs its message when it is imported."""
    # torchao below 0.16, the last that torchtune 0.6.1 can import, has C++ extensions for older versions of torch only.
    # The recipes use none of them.
    logging.getLogger("torchao").addFilter(_is_not_about_extensions)
    # torchdata's data loader calls it on every pass. It does nothing.
    warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning, r"torchdata\.")


def _is_not_about_extensions(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Skipping import of cpp extensions due to incompatible torch version")
