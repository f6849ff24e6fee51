"""Steps that run again in smaller micro-batches after an out-of-memory error."""
