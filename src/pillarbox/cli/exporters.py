"""The metrics of a relay or a consumer that listens."""

import logging

from pillarbox.errors import MissingExtra
from pillarbox.observe import Observer

log = logging.getLogger(__name__)


def exporters() -> list[Observer]:
    """What fills ``/metrics``; nothing without its extra."""
    try:
        from pillarbox.observe.prometheus import Prometheus
    except MissingExtra as error:
        log.warning("/metrics has nothing to show: %s", error, extra={"action": "no_metrics"})
        return []
    return [Prometheus()]
