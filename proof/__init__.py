"""Checks that Pillarbox keeps its promise while everything around it breaks: `python -m proof`."""
