"""What the relay costs beyond a bare script that does the same work: `python -m benchmarks`.

Every figure is a pair: ours, and a floor measured a moment before or after it on the same servers.
"""
