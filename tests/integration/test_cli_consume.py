"""``pillarbox consume``: a consumer of the settings, and one of the user's own code."""

import signal
from pathlib import Path

import pytest

from tests.integration.commands import Command
from tests.integration.relays import eventually

SHOP = """
from pathlib import Path

from pillarbox import Consumer, Event, Handlers
from pillarbox.conformance.events import make_event
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.sources.memory import MemorySource, MemoryTopic

topic = MemoryTopic()
for number in range(3):
    topic.send(make_event(key="7", payload=b"%d" % number))
handlers, dead = Handlers(), MemoryPublisher()


@handlers.on("order.created")
def handle(event: Event) -> None:
    with Path("handled").open("ab") as file:
        file.write(event.payload)


def source():
    return MemorySource(topic)


def decode(message):
    return make_event(payload=b"decoded")


def dying():
    made = MemorySource(topic)

    async def receive(limit, seconds):
        raise RuntimeError("the thread is dead")

    made.receive = receive
    return made


def consumer():
    return Consumer("cards", MemorySource(topic), to=handlers, dead_to=dead)


def failing():
    return Consumer("cards", dying(), to=handlers, dead_to=dead)
"""


@pytest.fixture
def shop(tmp_path: Path) -> Command:
    (tmp_path / "shop.py").write_text(SHOP)
    command = Command(tmp_path, "")
    command.variables = {}
    return command


async def run_until_handled(shop: Command, wanted: bytes, *words: str, number: int = signal.SIGTERM) -> tuple[int, str]:
    """The exit code and the log of a consumer that was stopped after it had handled this."""
    process = shop.start("consume", *words)
    handled = shop.folder / "handled"

    async def is_handled() -> bool:
        return process.poll() is not None or (handled.exists() and handled.read_bytes() == wanted)

    try:
        await eventually(is_handled, seconds=60)
        if process.poll() is None:
            process.send_signal(number)
        _, log = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, log.decode()


@pytest.mark.asyncio
async def test_a_consumer_of_ones_own_code(shop: Command) -> None:
    code, log = await run_until_handled(shop, b"012", "shop:consumer", number=signal.SIGINT)
    assert code == 0, log
    assert "consumer 'cards' reads memory memory and gives events to handlers (16)" in log
    assert "consumer 'cards' stopped" in log


@pytest.mark.asyncio
async def test_a_consumer_of_the_settings(shop: Command) -> None:
    (shop.folder / "pillarbox.toml").write_text(
        "[consumers.cards]\nfrom = 'shop:source'\nto = 'shop:handlers'\ndead_to = 'shop:dead'\nconcurrency = 3\n"
        "[consumers.mailer]\nfrom = 'shop:source'\nto = 'shop:handlers'\non_dead = 'block'\n"
    )
    code, log = await run_until_handled(shop, b"012", "--consumer", "cards", "--name", "ann", "--grace", "5s")
    assert code == 0, log
    assert "gives events to handlers (3), as ann-" in log
    shop("consume").failed(2, "pillarbox.toml has several consumers: cards, mailer; choose one with --consumer")
    shop("consume", "--consumer", "card").failed(2, "is 'card', which is no consumer", "did you mean 'cards'?")
    shop("consume", "--consumer", "cards", "--to", "shop:dead").failed(
        2, "--to and [consumers.cards] of pillarbox.toml name different destinations"
    )


@pytest.mark.asyncio
async def test_a_consumer_of_flags(shop: Command) -> None:
    words = ("--from", "shop:source", "--to", "shop:handlers", "--on-dead", "block", "--decoder", "shop:decode")
    code, log = await run_until_handled(shop, b"decoded" * 3, *words)
    assert code == 0, log
    assert "consumer 'default' reads" in log


def test_a_source_that_dies_ends_the_service(shop: Command) -> None:
    ended = shop("consume", "shop:failing")
    assert ended.code == 1
    assert (
        "consumer 'cards' has failed and does not start again by itself (RuntimeError: the thread is dead)" in ended.err
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "consumer 'default' has no 'from'; give --from, for example --from kafka://localhost:9092?topic=orders"),
        (("--from", "shop:source"), "has no 'to'; give --to, for example --to shop.handlers:handlers"),
        (("--from", "shop:source", "--to", "shop:handlers"), "has no place for dead events"),
        (("--from", "shop:dead", "--to", "shop:handlers"), "shop:dead is a MemoryPublisher; name a Source"),
        (("--from", "kafak://host", "--to", "shop:handlers", "--on-dead", "block"), "did you mean 'kafka'?"),
        (("--from", "shop:source", "--to", "shop:handlers", "--on-dead", "park"), "on_dead='park': use one of: skip"),
        (("shop:handlers",), "shop:handlers is a Handlers; name a Consumer"),
        (("shop:consumer", "--to", "stdout:"), "--to does not apply to shop:consumer"),
        (("--lease", "1s"), "has no option --lease"),
    ],
)
def test_a_mistake_is_one_sentence(shop: Command, words: tuple[str, ...], said: str) -> None:
    shop("consume", *words).failed(2, said)


def test_a_table_of_consumers_is_checked(shop: Command) -> None:
    file = shop.folder / "pillarbox.toml"
    for text, said in (
        (
            "[consumers.cards]\nfrmo = 'x'\n",
            "[consumers.cards] in pillarbox.toml has an unknown setting 'frmo'; did you",
        ),
        ("[consumers]\nfrom = 'x'\n", "[consumers] in pillarbox.toml has 'from' but no consumer"),
        ("[consumers.cards]\nlease = '1s'\n", "has an unknown setting 'lease'"),
        ("consumers = 3\n", "'consumers' in pillarbox.toml is not a table"),
    ):
        file.write_text(text)
        shop("consume").failed(2, said)
