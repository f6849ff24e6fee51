"""Out-of-memory errors survived: on one device, and on all ranks of an FSDP2 model together."""
