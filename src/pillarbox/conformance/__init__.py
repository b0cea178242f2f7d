"""What every adapter must do, as test classes to subclass for an adapter of one's own."""

import pytest

# Before they are imported: else their asserts would fail without saying what was compared.
pytest.register_assert_rewrite(
    "pillarbox.conformance.publisher",
    "pillarbox.conformance.store",
    "pillarbox.conformance.store_finding",
    "pillarbox.conformance.store_keys",
    "pillarbox.conformance.store_operations",
    "pillarbox.conformance.store_ownership",
    "pillarbox.conformance.store_queue",
    "pillarbox.conformance.store_setup",
    "pillarbox.conformance.store_turns",
    "pillarbox.conformance.store_writing",
)

from pillarbox.conformance.events import make_event, unique_key  # noqa: E402
from pillarbox.conformance.publisher import Delivery, PublisherContract  # noqa: E402
from pillarbox.conformance.store import StoreContract  # noqa: E402
from pillarbox.conformance.store_setup import AuditRow, Connect  # noqa: E402

__all__ = [
    "AuditRow",
    "Connect",
    "Delivery",
    "PublisherContract",
    "StoreContract",
    "make_event",
    "unique_key",
]
