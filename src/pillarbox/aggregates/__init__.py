"""Aggregates that record their own events, and units of work that write these with the aggregate's data."""

from pillarbox.aggregates.aggregate import Aggregate, check_saved, current_tenant
from pillarbox.aggregates.unit_of_work import UnitOfWork

__all__ = ["Aggregate", "UnitOfWork", "check_saved", "current_tenant"]
