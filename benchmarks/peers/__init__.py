"""Other relays and outboxes in the same run as ours: `python -m benchmarks --only peers`.

Each is set up as its documentation recommends. The modules named `drive_...` run in the peer's environment: they and
their imports may need only the standard library and the packages of that environment.
"""
