"""Searches of other projects and of this package, on one train step under one limit: see ``benchmarks.search``."""
