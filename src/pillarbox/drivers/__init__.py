"""One file for each Python driver. It knows the caller's handle; every feature uses it through the same methods."""

from pillarbox.drivers.contract import Answer, Driver, PoolDriver, Statement, Steps, TextBlocks
from pillarbox.drivers.registry import driver_of

__all__ = ["Answer", "Driver", "PoolDriver", "Statement", "Steps", "TextBlocks", "driver_of"]
