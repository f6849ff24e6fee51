"""Agree on decisions between ranks, and recover on all ranks when one of them runs out of memory."""
