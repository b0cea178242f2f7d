"""The wiki of examples/, on real servers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from examples.wiki.wiki import STREAMS, Wiki
from pillarbox import Event, Relay, Status
from pillarbox.maintenance.reconcile import Reconcile, Reconciled
from pillarbox.store import Filter
from servers import Mongo, MongoStandalone
from tests.integration.relays import eventually
from tests.mongo_outbox import database_url

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "wiki" / "wiki.py"

Make = Callable[..., Any]


class Watched(Wiki):
    """Counts what its handlers are given, and fails when it is told to."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.failures: Counter[tuple[str, str]] = Counter()

    def render(self, event: Event) -> None:
        self._called("wiki", event)
        super().render(event)

    def index(self, event: Event) -> None:
        self._called("search", event)
        super().index(event)

    def _called(self, stream: str, event: Event) -> None:
        page_id, revision_id, _ = self.revision(event)
        call = (stream, f"{page_id}:{revision_id}")
        self.calls[call] += 1
        if self.calls[call] <= self.failures[call]:
            raise ConnectionError("the index is away")

    def ids(self, name: str) -> set[str]:
        """Of the documents in the collection of that name."""
        return {each["_id"] for each in getattr(self, name).find()}


@pytest.fixture(params=["transactions", "without"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Wikis on a new database of a replica set, or without transactions on a standalone server."""
    transactions = request.param == "transactions"
    server: Mongo = request.getfixturevalue("mongo" if transactions else "mongo_standalone")
    yield from _make(server, transactions)


@pytest.fixture
def make_with(mongo: Mongo) -> Iterator[Make]:
    yield from _make(mongo, True)


@pytest.fixture
def make_without(mongo_standalone: MongoStandalone) -> Iterator[Make]:
    yield from _make(mongo_standalone, False)


def _make(server: Mongo, transactions: bool) -> Iterator[Make]:
    url = database_url(server.url, f"wiki_{uuid4().hex[:12]}")
    made: list[Wiki] = []

    def make(kind: type[Wiki] = Watched) -> Wiki:
        made.append(kind(url, transactions=transactions, patience=timedelta(0)))
        return made[-1]

    yield make
    for wiki in made:
        wiki.client.close()


def run(wiki: Wiki, *work: Callable[[Relay], Any]) -> list[Any]:
    """A relay that does the work and then all that is ready."""

    async def through() -> list[Any]:
        relay = wiki.relay()
        await relay.store.migrate()
        async with relay:
            done = [await each(relay) for each in work]
            await relay.drain()
        return done

    return asyncio.run(through())


def migrate(wiki: Wiki) -> None:
    async def through() -> None:
        store = wiki.relay().store
        await store.migrate()
        await store.close()

    asyncio.run(through())


async def reconcile(relay: Relay) -> Reconciled:
    return await Reconcile(relay.store, relay.checks[0]).run_once()


def counts(stream: str, wanted: dict[Status, int]) -> Callable[[Relay], Any]:
    """Until the stream has exactly these."""

    async def through(relay: Relay) -> None:
        async def ask() -> dict[Status, int]:
            return {status: n for status, n in (await relay.store.count(stream)).items() if n}

        await eventually(ask, lambda found: found == wanted)

    return through


def status(wiki: Wiki, *options: str, code: int = 0) -> dict[str, int]:
    """The dead letters of each stream, as an operator sees them."""
    words = [sys.executable, "-m", "pillarbox", "status", "--json", *options]
    environment = os.environ | {"PILLARBOX_STORE": wiki.url}
    told = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert told.returncode == code, told.stderr
    return {row["stream"]: row["dead"] for row in json.loads(told.stdout)}


def test_the_program_tells_its_story(make: Make) -> None:
    wiki = make()
    words = [sys.executable, str(PROGRAM), wiki.url, *([] if wiki.transactions else ["--without-transactions"])]
    told = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    pages = {"broken", *(f"page-{number}" for number in range(5)), *([] if wiki.transactions else ["forgotten"])}
    revisions = {f"page-{number}:{revision}" for number in range(5) for revision in range(1, 5)}
    revisions |= set() if wiki.transactions else {"forgotten:1"}
    assert wiki.ids("snapshots") == revisions
    assert wiki.ids("words") == wiki.ids("media") == pages
    assert wiki.media.find_one({"_id": "page-3"}) == {"_id": "page-3", "revision_id": 4, "links": 1, "media": 1}
    assert wiki.words.find_one({"_id": "page-3"}, {"words": {"$slice": 2}})["words"] == ["18", "a"]
    assert "<img" in wiki.snapshots.find_one({"_id": "page-3:4"})["html"]
    assert f"{len(revisions)} snapshots" in told.stdout
    dead = status(wiki)
    assert dead == {"wiki": 1, "search": 0, "media": 0}, "what cannot be rendered can still be found and counted"


def test_its_metrics_show_the_work_of_each_stream(make_with: Make) -> None:
    wiki = make_with()
    migrate(wiki)
    for revision in range(3):
        wiki.save("home", f"text {revision}")
    run(wiki)
    page = wiki.metrics.page()[1].decode()
    for stream in STREAMS:
        assert f'outbox_new_total{{stream="{stream}"}} 3.0' in page
        assert f'outbox_done_total{{stream="{stream}"}} 3.0' in page
        assert f'outbox_inflight{{stream="{stream}"}} 0.0' in page


def test_a_save_that_fails_leaves_nothing(make_with: Make) -> None:
    class Failing(Wiki):
        def events(self, page_id: str, revision_id: int) -> list[Event]:
            raise OSError("the machine is full")

    wiki = make_with(Failing)
    migrate(wiki)
    with pytest.raises(OSError, match="full"):
        wiki.save("home", "text")
    assert not wiki.pages.count_documents({})
    assert not wiki.revisions.count_documents({})


def test_a_writer_that_is_killed_before_its_events_is_made_good_once(make_without: Make) -> None:
    wiki = make_without()
    migrate(wiki)
    wiki.save("before", "a page")
    writer = (
        "import sys, time\n"
        "from examples.wiki.wiki import Wiki\n"
        "class Slow(Wiki):\n"
        "    def events(self, page_id, revision_id):\n"
        "        print('the data is written', flush=True)\n"
        "        time.sleep(600)\n"
        "Slow(sys.argv[1], transactions=False).save('lost', 'a [[page]]')\n"
    )
    with subprocess.Popen([sys.executable, "-c", writer, wiki.url], cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"the data is written\n"
        finally:
            process.send_signal(signal.SIGKILL)
    assert wiki.ids("revisions") == {"before:1", "lost:1"}

    run(wiki)
    assert wiki.ids("snapshots") == {"before:1"}, "nothing tells of the other one yet"

    first, again = run(wiki, reconcile, reconcile)
    assert (first.missing, first.emitted) == (3, 3)
    assert again.emitted == 0
    assert wiki.ids("snapshots") == {"before:1", "lost:1"}
    assert wiki.ids("words") == wiki.ids("media") == {"before", "lost"}
    assert wiki.calls == {(stream, f"{page}:1"): 1 for stream in ("wiki", "search") for page in ("before", "lost")}
    assert run(wiki, reconcile)[0].found == 0


def test_events_that_were_written_in_part_are_made_good(make_without: Make) -> None:
    wiki = make_without()
    migrate(wiki)
    wiki.write("home", "a page")
    wiki.outbox.add_all(wiki.client, wiki.events("home", 1)[:1])
    assert run(wiki, reconcile)[0].emitted == len(STREAMS) - 1
    assert wiki.ids("snapshots") == {"home:1"}
    assert wiki.ids("words") == wiki.ids("media") == {"home"}


def test_a_writer_that_comes_after_the_check_writes_no_copy(make_without: Make) -> None:
    wiki = make_without()
    migrate(wiki)
    wiki.write("home", "a page")
    run(wiki, reconcile)
    wiki.outbox.add_all(wiki.client, wiki.events("home", 1), on_duplicate="ignore")
    run(wiki)
    assert wiki.calls == {("wiki", "home:1"): 1, ("search", "home:1"): 1}


def test_handlers_may_run_twice_and_in_any_order(make: Make) -> None:
    wiki = make()
    for text in ("one", "two [[b]]", "three [[b]] [[c]]"):
        wiki.write("home", text)
    events = [wiki.events("home", revision)[0] for revision in (3, 1, 2)] * 4
    with ThreadPoolExecutor(4) as pool:
        for handler in (wiki.render, wiki.index, wiki.recount):
            list(pool.map(handler, events))
    assert wiki.ids("snapshots") == {"home:1", "home:2", "home:3"}
    assert list(wiki.words.find()) == [{"_id": "home", "revision_id": 3, "words": ["b", "c", "three"]}]
    assert list(wiki.media.find()) == [{"_id": "home", "revision_id": 3, "links": 2, "media": 0}]


def test_a_handler_that_fails_is_tried_again_and_others_go_on(make: Make) -> None:
    wiki = make()
    wiki.failures["search", "home:1"] = 1
    migrate(wiki)
    for page in ("home", "other"):
        wiki.save(page, f"the {page} page")
    run(wiki, counts("search", {Status.PUBLISHED: 2}))
    assert wiki.calls["search", "home:1"] == 2
    assert wiki.calls["search", "other:1"] == wiki.calls["wiki", "home:1"] == 1
    assert wiki.ids("words") == {"home", "other"}


def test_poison_is_a_dead_letter_and_others_go_on(make: Make) -> None:
    wiki = make()
    migrate(wiki)
    wiki.save("poison", "a [[link")
    wiki.save("home", "a page")

    async def letters(relay: Relay) -> list[str]:
        return [str(letter.last_error) for letter in await relay.store.find_dead(Filter(stream="wiki"), 10)]

    _, found = run(wiki, counts("wiki", {Status.PUBLISHED: 1, Status.DEAD: 1}), letters)
    assert len(found) == 1
    assert "poison:1 has a link without an end" in found[0]
    assert wiki.calls["wiki", "poison:1"] == 1, "no retry would mend it"
    assert wiki.ids("snapshots") == {"home:1"}
    assert wiki.ids("words") == wiki.ids("media") == {"poison", "home"}


def test_the_command_line_serves_it_and_tells_of_it(make: Make) -> None:
    wiki = make()
    migrate(wiki)
    wiki.save("poison", "a [[link")
    wiki.save("home", "a page")
    mode = {"WIKI_URL": wiki.url, "WIKI_TRANSACTIONS": "1" if wiki.transactions else "0"}
    drain = [sys.executable, "-m", "pillarbox", "relay", "wiki:relay", "--drain"]
    done = subprocess.run(drain, cwd=PROGRAM.parent, env=os.environ | mode, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert wiki.ids("snapshots") == {"home:1"}
    assert status(wiki, "--fail-if-dead", code=1) == {"wiki": 1, "search": 0, "media": 0}
