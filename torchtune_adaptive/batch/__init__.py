"""What an optimizer step is made of: samples, micro-batches, and how the batch size grows."""
