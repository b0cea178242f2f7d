"""An adapter whose library is not installed names the extra to install."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
for library in sys.argv[2].split():
    sys.modules[library] = None
from pillarbox.errors import MissingExtra
try:
    __import__(sys.argv[1])
except MissingExtra as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "libraries", "extra"),
    [
        ("pillarbox.stores.postgres", "asyncpg", "postgres"),
        ("pillarbox.stores.mysql", "asyncmy", "mysql"),
        ("pillarbox.stores.mongo", "bson pymongo", "mongo"),
        ("pillarbox.publishers.kafka", "confluent_kafka", "kafka"),
        ("pillarbox.publishers.rabbitmq", "aiormq pamqp", "rabbitmq"),
        ("pillarbox.sources.rabbitmq", "aiormq pamqp", "rabbitmq"),
        ("pillarbox.publishers.http", "aiohttp yarl", "http"),
    ],
)
def test_a_missing_extra_is_named(module: str, libraries: str, extra: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, module, libraries], capture_output=True, text=True)
    assert done.stdout.endswith(f" needs an extra; install it with: pip install 'pillarbox[{extra}]'\n"), done.stderr
