"""Helpers for projections: rows that are made of events, which may come twice and out of order."""

from pillarbox.projections.writer import upsert

__all__ = ["upsert"]
