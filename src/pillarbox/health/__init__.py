"""Health for probes and monitors: ``/livez``, ``/readyz`` and ``/metrics``, as a small server and as an ASGI
application."""

from pillarbox.health.health import Answer, Health, Subject
from pillarbox.health.server import HealthServer, next_port

__all__ = ["Answer", "Health", "HealthServer", "Subject", "next_port"]
