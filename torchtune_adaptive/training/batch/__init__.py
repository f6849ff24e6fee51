"""The samples of an optimizer step."""
