"""Measures the relay against bare scripts that do the same work: `python -m benchmarks`.

Every figure is a pair: ours, and a floor that is measured a moment before or after it on the same servers.
"""
