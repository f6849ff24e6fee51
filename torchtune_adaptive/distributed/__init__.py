"""Agree on decisions between ranks, and recover on all ranks if one runs out of memory."""
