"""The demo: a shop on SQLite, two relays, a kill, and the proof that nothing was lost."""
