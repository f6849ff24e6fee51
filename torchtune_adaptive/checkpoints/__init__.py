"""Checkpoints of a run: written atomically after any step, and found again by a resumed run."""
