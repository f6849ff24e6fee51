"""The searches of other projects and ours, on the same train step under the same limit: see ``benchmarks.search``."""
