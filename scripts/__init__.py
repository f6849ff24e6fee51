"""Maintenance of the repository, run manually or by CI."""
