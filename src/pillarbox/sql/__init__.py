"""Shared by drivers and stores of SQL databases: columns, cells and dialects."""
