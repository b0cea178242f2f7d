"""The app."""

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks

from pillarbox.django.configuration import configuration
from pillarbox.errors import ConfigError


class PillarboxConfig(AppConfig):
    name = "pillarbox.django"
    label = "pillarbox"
    verbose_name = "Pillarbox"

    def ready(self) -> None:
        checks.register(check_settings)


def check_settings(app_configs: Any = None, **options: Any) -> Sequence[checks.CheckMessage]:
    try:
        configuration().check()
    except ConfigError as error:
        sentence, _, remedy = str(error).partition("; ")
        return [checks.Error(sentence, hint=remedy or None, id="pillarbox.E001")]
    return []
