"""One function per invariant: from the facts of a history to its violations."""
