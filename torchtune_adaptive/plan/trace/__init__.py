"""A train step traced on tensors without memory."""
