"""What benchmarks share with tests: ranks, tiny recipes, and launched runs."""
