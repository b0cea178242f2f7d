"""The configuration of a Debezium connector, as `pillarbox debezium` prints it."""

import json
from pathlib import Path

import pytest

from pillarbox.cli import main, secrets
from pillarbox.envelopes.debezium import PLACED

KAFKA = "kafka://k1:9092,k2?topic=orders"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(secrets, "_known", set())
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, str], str]:
    """The configuration, and what was said beside it."""
    assert main(["debezium", *words]) == 0
    said = capsys.readouterr()
    settings = json.loads(said.out)
    assert all(type(value) is str for value in settings.values())
    return settings, said.err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["debezium", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_postgres(capsys: pytest.CaptureFixture[str]) -> None:
    url = "postgresql+asyncpg://u%40x:secret@db/shop"
    found, said = printed(capsys, "--store", url, "--schema", "app", "--prefix", "box", "--to", KAFKA)
    assert found["connector.class"] == "io.debezium.connector.postgresql.PostgresConnector"
    assert (found["database.hostname"], found["database.port"], found["database.dbname"]) == ("db", "5432", "shop")
    assert (found["database.user"], found["database.password"]) == ("u@x", "${env:PILLARBOX_PASSWORD}")
    assert found["table.include.list"] == "app.box_event"
    assert found["slot.name"] == found["publication.name"] == found["topic.prefix"] == "pillarbox"
    assert found["transforms.outbox.route.topic.regex"] == "^$"
    assert found["transforms.outbox.route.topic.replacement"] == "orders"
    placed = found["transforms.outbox.table.fields.additional.placement"]
    assert dict(each.split(":header:") for each in placed.split(",")) == dict(PLACED)
    assert "secret" not in said + json.dumps(found)
    assert "envelope=debezium\n" in said


def test_its_publication(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--store", "postgresql://db/shop", "--to", KAFKA, "--stream", "o'clock", "--name", "shop", "--publication")
    assert main(["debezium", *words]) == 0
    assert capsys.readouterr().out == (
        "CREATE PUBLICATION shop FOR TABLE public.outbox_event WHERE (stream = 'o''clock') WITH (publish = 'insert');\n"
    )


def test_mysql(capsys: pytest.CaptureFixture[str]) -> None:
    found, said = printed(
        capsys, "--store", "mysql://db:3307/shop", "--to", f"{KAFKA}&envelope=debezium_base64", "--name", "a"
    )
    assert found["table.include.list"] == "shop.outbox_event"
    assert found["schema.history.internal.kafka.bootstrap.servers"] == "k1:9092,k2:9092"
    assert found["database.port"] == "3307"
    assert "database.password" not in found
    other, _ = printed(capsys, "--store", "mysql://db/shop", "--to", KAFKA, "--name", "b")
    assert 2**30 <= int(found["database.server.id"]) < 2**32
    assert found["database.server.id"] != other["database.server.id"]
    assert said == ""


def test_mongo(capsys: pytest.CaptureFixture[str]) -> None:
    url = "mongodb://u:secret@m1,m2/shop?replicaSet=rs0&authSource=admin"
    found, said = printed(capsys, "--store", url, "--to", "kafka://k?topic=*", "--stream", "mail")
    assert found["mongodb.connection.string"] == "mongodb://m1,m2/?replicaSet=rs0"
    assert (found["mongodb.user"], found["mongodb.authsource"]) == ("u", "admin")
    assert found["collection.include.list"] == "shop.outbox_event"
    assert json.loads(found["cursor.pipeline"])[0] == {"$match": {"fullDocument.stream": "mail"}}
    assert found["transforms.outbox.route.topic.regex"] == "(.*)"
    assert "secret" not in said + json.dumps(found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no store is given"),
        (("--store", "postgresql://db/shop"), "give --to"),
        (("--store", "postgresql://db/shop", "--to", "stdout:"), "give --to"),
        (("--store", "sqlite:///shop.db", "--to", KAFKA), "PostgreSQL, MySQL and MongoDB"),
        (("--store", "mariadb://db/shop", "--to", KAFKA), "PostgreSQL, MySQL and MongoDB"),
        (("--store", "postgresql://a,b/shop", "--to", KAFKA), "name the primary"),
        (("--store", "postgresql://a/shop", "--to", KAFKA, "--name", "Shop-1"), "small letters"),
        (("--store", "postgresql://a/shop", "--to", "kafka://k?topic=a b"), "not a name that Kafka takes"),
        (("--store", "mysql://a/shop", "--to", KAFKA, "--publication"), "leave it out"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *words)


def test_several_streams(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pillarbox.toml").write_text(
        f'store = "postgresql://db/shop"\n[streams.default]\nto = "{KAFKA}"\n[streams.mail]\nto = "stdout:"\n'
    )
    assert "choose one with --stream" in refused(capsys)
    found, _ = printed(capsys, "--stream", "default")
    assert found["transforms.outbox.route.topic.replacement"] == "orders"
