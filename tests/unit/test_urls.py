import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError, MissingExtra
from pillarbox.publisher import PUBLISHED
from pillarbox.stores.memory import MemoryStore
from pillarbox.stores.sqlite import SqliteStore
from pillarbox.urls import PUBLISHERS, STORES, publisher_from_url, store_class, store_from_url, store_of

TOY = """
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.stores.memory import MemoryStore

class ToyStore(MemoryStore):
    pass

class ToyPublisher(MemoryPublisher):
    options = frozenset({"greeting"})

    @classmethod
    def from_url(cls, url, greeting="hello"):
        made = cls()
        made.url, made.greeting = url, greeting
        return made

class Nameless:
    options = frozenset()
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package with entry points onto sys.path, as pip would."""

    def write(entry_points: str, *, package: str = "toy", code: str = TOY) -> None:
        folder = tmp_path / package
        metadata = folder / f"{package}_box-1.0.dist-info"
        metadata.mkdir(parents=True)
        (folder / f"{package}_box.py").write_text(code)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}-box\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(entry_points)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, f"{package}_box", raising=False)

    return write


@pytest.mark.asyncio
async def test_another_package_serves_a_scheme(install: Install) -> None:
    install("[pillarbox.stores]\ntoy = toy_box:ToyStore\n[pillarbox.publishers]\ntoy+x = toy_box:ToyPublisher\n")
    store = store_from_url("toy:", prefix="other")
    await store.migrate()
    await store.open()
    assert type(store).__name__ == "ToyStore"
    assert await store.prefixes() == ["other"]
    await store.close()
    publisher = publisher_from_url("toy+x://somewhere", greeting="hi")
    await publisher.open()
    assert await publisher.publish(Batch.of([make_event()])) == [PUBLISHED]
    assert vars(publisher)["url"] == "toy+x://somewhere"
    assert vars(publisher)["greeting"] == "hi"


def test_a_package_cannot_take_over_a_built_in_scheme(install: Install) -> None:
    install("[pillarbox.stores]\nsqlite = toy_box:ToyStore\n")
    assert store_class("sqlite:///shop.db") is SqliteStore


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("toy = toy_box:Missing", r"'toy' URLs are served by toy_box:Missing of the package toy-box, which cannot be"),
        ("toy = not_there_at_all:X", "cannot be loaded .ModuleNotFoundError: .* correct or uninstall the package"),
        ("toy = toy_box:Nameless", "which has no 'from_url'; correct or uninstall the package"),
        ("toy = pathlib:Path", "which has no 'from_url'"),
        ("boy = toy_box:ToyStore", r"a store URL cannot start with 'toy'; did you mean 'boy'\?"),
    ],
)
def test_a_broken_entry_point_is_one_sentence(install: Install, entry: str, message: str) -> None:
    install(f"[pillarbox.stores]\n{entry}\n")
    with pytest.raises(ConfigError, match=message):
        store_from_url("toy:")


def test_two_packages_for_one_scheme(install: Install) -> None:
    install("[pillarbox.stores]\ntoy = toy_box:ToyStore\n")
    install("[pillarbox.stores]\ntoy = boy_box:ToyStore\n", package="boy")
    with pytest.raises(ConfigError, match="several packages serve 'toy' URLs: boy-box, toy-box; uninstall"):
        store_from_url("toy:")


def test_the_error_of_a_package_itself_stays(install: Install) -> None:
    install("[pillarbox.stores]\ntoy = toy_box:ToyStore\n", code="from pillarbox.errors import MissingExtra\n"
            "raise MissingExtra('ToyStore', 'toy')\n")  # fmt: skip
    with pytest.raises(MissingExtra, match="ToyStore needs an extra"):
        store_from_url("toy:")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgre://h/d", r"a store URL cannot start with 'postgre'; did you mean 'postgresql'\?"),
        ("xyz://h", "cannot start with 'xyz'; use one of: postgresql, mysql"),
        ("s3cret", "^the store is not a URL; use one of: postgresql"),
    ],
)
def test_an_unknown_scheme(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        store_from_url(url)
    assert "s3cret" not in str(caught.value)


def test_options_are_declared() -> None:
    with pytest.raises(ConfigError, match=r"a sqlite store has no option 'prefixes'; did you mean 'prefix'\?"):
        store_from_url("sqlite:///shop.db", prefixes="x")
    with pytest.raises(ConfigError, match="a stdout publisher has no option 'headers'; leave it out"):
        publisher_from_url("stdout:", headers=len)


# Parts of a URL before its question mark.
FROM_THE_URL = {"servers", "namespace", "tls", "user", "password"}


@pytest.mark.parametrize("scheme", [*STORES, *PUBLISHERS])
def test_the_declared_options_are_those_of_the_constructor(scheme: str) -> None:
    module, _, name = (STORES | PUBLISHERS)[scheme].partition(":")
    kind = getattr(pytest.importorskip(module), name)
    parameters = inspect.signature(kind).parameters.values()
    named = {each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    for each in parameters:
        if each.kind is inspect.Parameter.VAR_KEYWORD:
            named |= get_args(each.annotation)[0].__annotations__.keys()
    assert kind.options == named - FROM_THE_URL


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("kafka://localhost:9092?topic=orders.dead", "orders.dead"),
        ("pulsar://localhost:6650?topic=orders.dead", "orders.dead"),
        ("amqp://localhost?queue=orders.dead", "orders.dead"),
        ("amqp://localhost?exchange=dead", "dead"),
        ("stdout:", ""),
    ],
)
def test_a_publisher_names_the_place_for_events_without_a_topic(url: str, address: str) -> None:
    assert publisher_from_url(url).default_address == address


class TestStoreOf:
    def test_a_store_or_a_url(self) -> None:
        store: object = MemoryStore()
        assert store_of(store) is store
        assert isinstance(store_of("sqlite:///shop.db", prefix="x"), SqliteStore)

    @pytest.mark.parametrize("handle", [None, 7, object(), MemoryStore])
    def test_anything_else_is_refused_with_the_list(self, handle: object) -> None:
        with pytest.raises(
            ConfigError,
            match=r"is no store; pass a URL, a Store, an asyncpg pool, an SQLAlchemy engine, or a PyMongo client",
        ):
            store_of(handle)

    def test_options_need_a_url_or_a_handle(self) -> None:
        with pytest.raises(ConfigError, match="prefix: give a store its options where you make it"):
            store_of(MemoryStore(), prefix="x")

    @pytest.mark.parametrize(
        ("package", "module"),
        [
            ("asyncpg.pool", "pillarbox.stores.handles"),
            ("sqlalchemy.ext.asyncio.engine", "pillarbox.stores.handles"),
            ("pymongo.asynchronous.mongo_client", "pillarbox.stores.mongo.handles"),
        ],
    )
    def test_a_handle_goes_to_the_adapter_of_its_package(
        self, monkeypatch: pytest.MonkeyPatch, package: str, module: str
    ) -> None:
        class Base:
            def __getattr__(self, name: str) -> str:
                return name  # as a PyMongo client does

        Base.__module__ = package

        class Handle(Base):  # an application's own subclass
            pass

        store: object = MemoryStore()
        given: list[object] = []

        def store_of_handle(handle: object, **options: object) -> object:
            given.append((handle, options))
            return store

        adapter = ModuleType(module)
        vars(adapter)["store_of_handle"] = store_of_handle
        monkeypatch.setitem(sys.modules, module, adapter)
        handle = Handle()
        assert store_of(handle, prefix="x") is store
        assert given == [(handle, {"prefix": "x"})]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("h:port/x", "a host or a port is wrong"),
        ("h:99999/x", "a host or a port is wrong"),
        ("h/x?tls=true&tlsCAFile=/nowhere/ca.pem", r"/nowhere/ca\.pem cannot be read: No such file"),
    ],
)
async def test_a_url_that_the_driver_of_mongodb_refuses_is_a_wrong_setting(rest: str, said: str) -> None:
    store = store_from_url(f"mongodb://ann:hunter22@{rest}")
    with pytest.raises(ConfigError, match=f"the store URL cannot be used .{said}.*; write mongodb://") as refused:
        await store.open()
    assert "hunter22" not in str(refused.value)


@pytest.mark.parametrize("url", ["postgresql://h:99999/x", "postgresql://h:port/x"])
def test_a_port_of_postgresql_is_checked_before_a_relay_starts(url: str) -> None:
    with pytest.raises(ConfigError, match="a port that is no number"):
        store_from_url(url)
    with pytest.raises(ConfigError, match="a port that is no number"):
        store_from_url("postgresql://h/x", listen_url=url)


def test_a_missing_file_of_postgresql_is_found_before_a_relay_starts() -> None:
    with pytest.raises(
        ConfigError, match=r"sslrootcert of the store URL names the file /nowhere/ca\.pem, which does not"
    ):
        store_from_url("postgresql://h/x?sslmode=verify-full&sslrootcert=/nowhere/ca.pem")


@pytest.mark.parametrize("url", ["kafka://u:hunter22/@h?topic=a", "kafka://u:hunter22#@h", "kafka://u:[hunter22@h"])
def test_an_unescaped_password_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        publisher_from_url(url)
    assert "hunter22" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "description"),
    [
        ("postgres://h/d", "postgresql h:5432/d"),
        ("postgresql+asyncpg://h/d", "postgresql h:5432/d"),
        ("mysql+asyncmy://h/d", "mysql h:3306/d"),
        ("mariadb+pymysql://h/d", "mariadb h:3306/d"),
        ("sqlite+aiosqlite:///shop.db", "sqlite shop.db"),
    ],
)
def test_a_url_of_sqlalchemy_is_one_of_a_store(url: str, description: str) -> None:
    assert store_from_url(url).description == description
