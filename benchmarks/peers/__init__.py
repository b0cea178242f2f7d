"""Other relays and outboxes in the same run as ours: `python -m benchmarks --only peers`.

Each is set up as its own documentation recommends. The modules named `drive_...` run in the peer's environment, so
nothing here or in what they import may need more than the standard library and what that environment has.
"""
