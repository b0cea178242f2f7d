"""Pillarbox as a Django app: ``"pillarbox.django"`` in INSTALLED_APPS."""

from pillarbox.django.handlers import Handlers
from pillarbox.drivers.django import Database

__all__ = ["Database", "Handlers"]
