"""Find the largest batch size that fits by running whole train steps, after which all state is restored."""
