"""Nobody who may connect to the database gets the rights of the role that made the outbox."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import pytest_asyncio

from pillarbox.stores.postgres import PostgresStore
from servers import Postgres

pytestmark = pytest.mark.asyncio

# A view in the place of the table that the wake-up function reads; whoever reads it runs the attacker's function.
_TRAP = """
    CREATE TEMP TABLE loot (who text);
    GRANT ALL ON loot TO PUBLIC;
    CREATE FUNCTION pg_temp.trap() RETURNS text LANGUAGE sql VOLATILE AS
        'INSERT INTO pg_temp.loot SELECT current_user RETURNING ''default''';
    CREATE TEMP VIEW {prefix}_sleeper AS SELECT pg_temp.trap() AS stream;
    GRANT ALL ON {prefix}_sleeper TO PUBLIC;
"""
_INSERT = """INSERT INTO {prefix}_event (id, stream, tenant, topic, type, key_hash, payload, content_type, status)
    VALUES (gen_random_uuid(), 'default', 'default', '', 'order.created', 0, '', 'text/plain', 'pending')"""
_OWN_TRIGGER = """
    CREATE TEMP TABLE bait (stream text);
    CREATE TRIGGER steal AFTER INSERT ON bait REFERENCING NEW TABLE AS added
        FOR EACH STATEMENT EXECUTE FUNCTION {prefix}_wake();
    INSERT INTO bait VALUES ('default');
"""


@dataclass
class Attacker:
    """A role that may connect, and has nothing but what it is granted."""

    prefix: str
    name: str
    owner_url: str
    url: str

    def grant(self, rights: str) -> None:
        with psycopg.connect(self.owner_url, autocommit=True) as owner:
            owner.execute(f"GRANT {rights} TO {self.name}".encode())

    def loot(self, attack: str) -> set[str]:
        """The roles that the attacker's function was run as."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(_TRAP.format(prefix=self.prefix).encode())
            connection.execute(attack.format(prefix=self.prefix).encode())
            return {row[0] for row in connection.execute("SELECT who FROM loot").fetchall()}


@pytest_asyncio.fixture
async def attacker(postgres: Postgres) -> AsyncIterator[Attacker]:
    prefix = f"takeover_{os.getpid()}"
    store = PostgresStore(postgres.url, prefix=prefix)
    await store.migrate()
    name = f"attacker_{os.getpid()}"
    parts = urlsplit(postgres.url)
    url = urlunsplit(parts._replace(netloc=f"{name}@{parts.hostname}:{parts.port}"))
    with psycopg.connect(postgres.url, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {name} LOGIN".encode())
    yield Attacker(prefix, name, postgres.url, url)
    with psycopg.connect(postgres.url, autocommit=True) as owner:
        owner.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())
    await store.remove()
    await store.close()


async def test_a_writer_cannot_put_a_view_in_the_place_of_a_table(attacker: Attacker) -> None:
    attacker.grant(f"INSERT ON {attacker.prefix}_event")
    assert attacker.loot(_INSERT) == set()


async def test_a_role_without_rights_cannot_use_the_function_for_a_trigger_of_its_own(attacker: Attacker) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        attacker.loot(_OWN_TRIGGER)
