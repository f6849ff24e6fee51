"""``tune-adaptive``: one module per command."""
