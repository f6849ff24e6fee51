"""Checkpoints of a run: at any step, whole or not there, and where a resumed run goes on."""
