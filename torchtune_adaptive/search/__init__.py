"""The largest batch size that fits, found by whole train steps that leave no trace."""
