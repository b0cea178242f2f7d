"""What every test can use."""

import signal
from pathlib import Path

import pytest

pytest_plugins = ["servers.fixtures"]

# A suite that nohup has started ignores hangups, and so would all programs that it starts to end them by one.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The files that take longest, in this order. They come first: a worker that got one of them at the end would work on
# alone after all others.
LONGEST = (
    "proof/test_planted.py",
    "proof/test_runs.py",
    "proof/test_consumers.py",
    "integration/test_cli_bench.py",
    "integration/test_relay_crash.py",
    "docs/test_projects.py",
    "docs/test_django_page.py",
    "examples/test_wiki.py",
    "docs/test_code_blocks.py",
    "docs/test_demo.py",
    "integration/test_cli.py",
    "integration/test_kafka_source.py",
    "integration/test_kafka_publisher.py",
    "conformance/test_source_kafka.py",
    "conformance/test_source_pulsar.py",
    "conformance/test_publisher_pulsar.py",
    "integration/test_pulsar_publisher.py",
    "integration/test_rabbitmq_source.py",
    "integration/test_rabbitmq_publisher.py",
    "integration/test_nats_publisher.py",
    "integration/test_redis_publisher.py",
    "integration/test_bench.py",
    "integration/test_relay_failures.py",
    "integration/test_relay_workers.py",
    "integration/test_mongo_faults.py",
    "integration/test_mongo_interleavings.py",
    "integration/test_doctor.py",
    "integration/test_metrics.py",
    "integration/test_relay_kafka.py",
    "test_servers.py",
    "test_package.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
