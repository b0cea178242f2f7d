"""The proof of consumers: three of them on one topic, and everything around them is broken."""
