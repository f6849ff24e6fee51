"""Recover from out-of-memory errors, on one device or on all ranks of an FSDP2 model."""
