"""Observers learn what a relay does; a wrapper around each contract tells them."""

from pillarbox.observe.observer import Exporter, Observer
from pillarbox.observe.observers import Observers
from pillarbox.observe.wrappers import observed_publisher, observed_store

__all__ = ["Exporter", "Observer", "Observers", "observed_publisher", "observed_store"]
