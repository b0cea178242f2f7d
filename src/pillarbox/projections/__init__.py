"""Helpers for projections: rows that are made of events, which may come twice and out of order."""

from pillarbox.projections.writer import Upserted, upsert

__all__ = ["Upserted", "upsert"]
