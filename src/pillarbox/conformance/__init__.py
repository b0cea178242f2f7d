"""The contracts of all adapters as test classes. Subclass them for an adapter of your own."""

import pytest

# Before the import: else a failed assert would not show what it compared.
pytest.register_assert_rewrite(
    "pillarbox.conformance.driver",
    "pillarbox.conformance.driver_setup",
    "pillarbox.conformance.publisher",
    "pillarbox.conformance.source",
    "pillarbox.conformance.store",
    "pillarbox.conformance.store_consumers",
    "pillarbox.conformance.store_finding",
    "pillarbox.conformance.store_gauges",
    "pillarbox.conformance.store_identity",
    "pillarbox.conformance.store_keys",
    "pillarbox.conformance.store_operations",
    "pillarbox.conformance.store_ownership",
    "pillarbox.conformance.store_queue",
    "pillarbox.conformance.store_reentry",
    "pillarbox.conformance.store_replay",
    "pillarbox.conformance.store_setup",
    "pillarbox.conformance.store_turns",
    "pillarbox.conformance.store_writing",
)

from pillarbox.conformance.driver import DriverContract  # noqa: E402
from pillarbox.conformance.driver_setup import Application  # noqa: E402
from pillarbox.conformance.events import make_event, unique_key  # noqa: E402
from pillarbox.conformance.publisher import Delivery, PublisherContract  # noqa: E402
from pillarbox.conformance.source import SourceContract  # noqa: E402
from pillarbox.conformance.store import StoreContract  # noqa: E402
from pillarbox.conformance.store_setup import AuditRow, Connect  # noqa: E402

__all__ = [
    "Application",
    "AuditRow",
    "Connect",
    "Delivery",
    "DriverContract",
    "PublisherContract",
    "SourceContract",
    "StoreContract",
    "make_event",
    "unique_key",
]
