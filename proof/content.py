"""What an event of a run holds, and what a delivery must have in common with its witness."""

import hashlib
from typing import Final

STREAM: Final = "proof"


def fingerprint(key: str | None, payload: bytes, mark: str) -> str:
    """Of key, payload and the header "proof"."""
    return hashlib.sha256(f"{key}\0{mark}\0".encode() + payload).hexdigest()
