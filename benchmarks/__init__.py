"""Measurements that anyone can repeat; results lie in ``results/`` with hardware, versions, commit and command."""
