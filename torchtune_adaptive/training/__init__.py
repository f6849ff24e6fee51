"""One optimizer step and its parts: objective, out-of-memory retries, learning rate, record, state."""
