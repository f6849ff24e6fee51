"""The samples of an optimizer step, their micro-batches, and the growth of the batch size."""
