"""One optimizer step, and what goes with it: out-of-memory retries, learning rate, record, state."""
