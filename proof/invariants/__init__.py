"""One function for each invariant: it takes the facts of a history and yields violations."""
