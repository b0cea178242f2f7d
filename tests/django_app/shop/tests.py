"""Run by Django's own test runner, on each database: see test_django_app.py."""

# ruff: noqa: PT009, PT027 (these are the tests of a Django project)

import asyncio
import re
import threading
from io import StringIO
from typing import Any
from unittest import mock, skipIf
from uuid import uuid4

from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command, load_command_class
from django.db import DatabaseError, close_old_connections, connection, connections, transaction
from django.test import Client, TestCase, TransactionTestCase, override_settings
from django.urls import reverse

from pillarbox import Event, Idempotency
from pillarbox.django import Database, Handlers
from pillarbox.django import models as rows
from pillarbox.django.configuration import configuration
from pillarbox.django.schema import RunSchema
from pillarbox.django.testing import captured_events, clear_outbox, deliver, relay_events, written_events
from pillarbox.errors import ConfigError, NotInTransaction, SchemaError
from pillarbox.sql.migrations import Migration
from tests.django_app.shop.handlers import handlers, inbox
from tests.django_app.shop.models import Order
from tests.django_app.shop.urls import once, outbox


def post(path: str, item: str, **headers: str) -> Any:
    client = Client(raise_request_exception=True)
    return client.post(path, {"item": item}, content_type="application/json", headers=headers)


class WritingTest(TestCase):
    def test_a_view_writes_its_event(self) -> None:
        with captured_events() as events:
            made = post("/orders", "lamp").json()
        (event,) = events
        self.assertEqual((event.type, event.key), ("order.created", str(made["id"])))
        self.assertEqual(event.payload, b'{"item":"lamp"}')

    def test_what_a_block_rolls_back_is_not_captured(self) -> None:
        with captured_events() as events:
            with transaction.atomic():
                outbox.add(connection, "kept", {}, headers={"a": "b"})
            with self.assertRaises(ZeroDivisionError), transaction.atomic():
                outbox.add(connection, "gone", {})
                raise ZeroDivisionError
        self.assertEqual([event.type for event in events], ["kept"])
        self.assertEqual(dict(events[0].headers), {"a": "b"})

    def test_a_view_without_a_block_is_refused_in_a_test_too(self) -> None:
        with self.assertRaisesRegex(
            NotInTransaction, r"commit together; write both inside of `with transaction.atomic"
        ):
            post("/forgetful", "lamp")

    def test_each_statement_of_ours_is_counted(self) -> None:
        with transaction.atomic(), self.assertNumQueries(1):
            outbox.add(connection, "order.created", {"a": "100 %"}, key="% %s")

    def test_an_async_view_says_how(self) -> None:
        with self.assertRaisesRegex(ConfigError, r"one plain function, and call it with `await sync_to_async"):
            asyncio.run(_called_by_asgi())

    def test_a_database_without_tables_says_how_to_make_them(self) -> None:
        with self.assertRaisesRegex(NotInTransaction, r"atomic\(using='bare'\)"):
            outbox.add(connections["bare"], "x", {})
        sentence = r"migrate pillarbox --database bare`; .*dependencies"
        with self.assertRaisesRegex(SchemaError, sentence), transaction.atomic(using="bare"):
            outbox.add(connections["bare"], "x", {})

    databases = {"default", "bare"}  # noqa: RUF012

    def test_handles(self) -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            outbox.add(cursor, "by a cursor", {})
            outbox.add(connections["default"], "by a wrapper", {})
            outbox.add_all(connection, [outbox.event(f"e{number}", {}) for number in range(3)])
        self.assertEqual([event.type for event in written_events()][-3:], ["e0", "e1", "e2"])
        with self.assertRaisesRegex(ConfigError, "pass django.db.connection"):
            outbox.add(Order(), "x", {})
        with self.assertRaisesRegex(ConfigError, "no database 'nowhere'"):
            Database("nowhere")

    def test_a_broken_block_takes_no_event(self) -> None:
        broken = mock.patch.object(connection, "needs_rollback", True)
        with self.assertRaises(transaction.TransactionManagementError), transaction.atomic(), broken:
            outbox.add(connection, "x", {})


async def _called_by_asgi() -> None:
    from tests.django_app.shop.urls import awaited

    await awaited(mock.Mock())


class ApplyingTest(TestCase):
    def test_handlers_see_what_the_test_wrote(self) -> None:
        with captured_events() as events:
            post("/orders", "lamp")
        deliver(handlers, events, copies=3)
        self.assertEqual(Order.objects.get().mails, 1)

    def test_an_async_handler(self) -> None:
        order = Order.objects.create(item="lamp")
        deliver(handlers, [outbox.event("order.looked_at", {}, key=order.pk), outbox.event("unknown", {})])
        self.assertEqual(Order.objects.get().mails, 10)

    def test_an_event_is_recorded_in_a_block_of_ones_own(self) -> None:
        event = outbox.event("order.created", {}, key=1)
        for expected in (True, False):
            with transaction.atomic():
                self.assertIs(bool(inbox.record(connection, event)), expected)
        with self.assertRaises(NotInTransaction):
            inbox.record(connection, event)


class IdempotencyTest(TestCase):
    def test_a_request_has_one_effect(self) -> None:
        key = str(uuid4())
        first, second = (post("/once", "lamp", **{"Idempotency-Key": key}) for _ in range(2))
        self.assertEqual((first.status_code, first.json()), (201, second.json()))
        self.assertEqual(Order.objects.count(), 1)
        self.assertIn("seen", first.cookies)
        self.assertEqual((second["Idempotent-Replayed"], second.cookies), ("true", {}))
        self.assertEqual(post("/once", "chair", **{"Idempotency-Key": key}).status_code, 422)
        self.assertEqual(post("/once", "lamp", **{"Idempotency-Key": key, "X-User": "bob"}).status_code, 201)

    def test_an_answer_from_400_on_rolls_back(self) -> None:
        for _ in range(2):
            self.assertEqual(post("/once", "sold out", **{"Idempotency-Key": "k"}).status_code, 409)
        self.assertFalse(Order.objects.exists())

    def test_a_stream_cannot_be_stored(self) -> None:
        with self.assertRaisesRegex(ConfigError, "streamed returned a StreamingHttpResponse"):
            post("/streamed", "lamp", **{"Idempotency-Key": "k"})
        self.assertFalse(Order.objects.exists())

    def test_what_cannot_be_decorated_says_so(self) -> None:
        from tests.django_app.shop.urls import awaited

        with self.assertRaisesRegex(ConfigError, "write `def awaited`"):
            once.view(awaited)
        with self.assertRaisesRegex(ConfigError, "cannot begin a transaction for each request"):
            Idempotency(connection, scope=str)
        view = once.view(lambda request: None)
        self.assertEqual(view._non_atomic_requests, {"default"})  # type: ignore[attr-defined]


class CommittingTest(TransactionTestCase):
    """With commits, and the relay's own connections."""

    def setUp(self) -> None:
        clear_outbox()

    def in_thread(self, work: Any) -> None:
        def run() -> None:
            work()
            close_old_connections()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(30)

    def test_the_relay_publishes(self) -> None:
        post("/orders", "lamp")
        relay_events()
        self.assertEqual(Order.objects.get().mails, 1)
        self.assertEqual([event.status for event in written_events()], ["published"])

    def test_outside_of_a_block_nothing_is_written(self) -> None:
        with self.assertRaisesRegex(NotInTransaction, "commits every statement by itself"):
            outbox.add(connection, "x", {})
        with self.assertRaises(NotInTransaction):
            post("/forgetful", "lamp")
        self.assertEqual(list(written_events()), [])

    def test_without_autocommit_the_caller_commits(self) -> None:
        transaction.set_autocommit(False)
        try:
            outbox.add(connection, "gone", {})
            transaction.rollback()
            outbox.add(connection, "kept", {})
            transaction.commit()
        finally:
            transaction.set_autocommit(True)
        self.assertEqual([event.type for event in written_events()], ["kept"])

    def test_a_key_is_free_while_its_request_failed_and_busy_while_it_runs(self) -> None:
        codes: list[int] = []

        def ask() -> None:
            codes.append(post("/once", "lamp", **{"Idempotency-Key": "k"}).status_code)

        self.assertEqual(post("/once", "sold out", **{"Idempotency-Key": "k"}).status_code, 409)
        if connection.vendor != "sqlite":  # whose writers wait
            with mock.patch("tests.django_app.shop.urls.outbox.add", side_effect=lambda *_, **__: self.in_thread(ask)):
                post("/once", "lamp", **{"Idempotency-Key": "k"})
            self.assertEqual(codes, [409])
            ask()
            self.assertEqual(codes, [409, 201])
            self.assertEqual(Order.objects.count(), 1)

    @override_settings(PILLARBOX={"prefix": "shop", "to": "nowhere"})
    def test_the_command_has_the_projects_store(self) -> None:
        post("/orders", "lamp")
        for words in (["status", "--json"], ["events", "list", "--json"], ["migrate"]):
            call_command("pillarbox", *words)
        with self.assertRaises(CommandError) as caught:
            call_command("pillarbox", "relay", "--drain")
        self.assertEqual(caught.exception.returncode, 2)

    def test_the_command_leaves_djangos_options_to_django(self) -> None:
        words = ["--settings=tests.django_app.settings", "events", "--pythonpath", ".", "list", "--json"]
        with self.assertRaises(SystemExit) as ended:
            load_command_class("pillarbox.django", "pillarbox").run_from_argv(["manage.py", "pillarbox", *words])
        self.assertEqual(ended.exception.code, 0)

    def test_a_migration_out_of_order_is_refused(self) -> None:
        """As in a release with a third version."""
        steps = [Migration(number, f"{number:04}_x.sql", []) for number in (1, 2, 3)]
        known = mock.patch("pillarbox.django.schema.migrations", return_value=steps)
        sentence = r"version 1, and this migration needs 2; .* in order and without --fake: `manage.py migrate --fake"
        with known, connection.schema_editor() as editor:
            RunSchema(1).database_forwards("pillarbox", editor, None, None)
            with self.assertRaisesRegex(SchemaError, sentence):
                RunSchema(3).database_forwards("pillarbox", editor, None, None)

    def test_the_migration_can_be_reversed_and_adopts_tables_that_are_there(self) -> None:
        def migrate(*words: str) -> None:
            call_command("migrate", "pillarbox", *words, verbosity=0)

        migrate("zero")
        tables = [name for name in connection.introspection.table_names() if name.startswith("shop_")]
        self.assertEqual([name for name in tables if name != "shop_order"], [])
        call_command("pillarbox", "init")
        migrate()
        post("/orders", "lamp")
        self.assertEqual(len(written_events()), 1)
        migrate("zero")
        migrate()
        post("/orders", "lamp")
        self.assertEqual(len(written_events()), 1)
        self.assertEqual(configuration().shards, 16)

    def test_tables_of_another_release_are_refused(self) -> None:
        call_command("migrate", "pillarbox", "zero", "--fake", verbosity=0)
        with connection.cursor() as cursor:
            cursor.execute("UPDATE shop_meta SET value = '99' WHERE name = 'schema_version'")
        try:
            with self.assertRaisesRegex(SchemaError, "version 99, this release knows only 1; install a newer"):
                call_command("migrate", "pillarbox", verbosity=0)
        finally:
            with connection.cursor() as cursor:
                cursor.execute("UPDATE shop_meta SET value = '1' WHERE name = 'schema_version'")
            call_command("migrate", "pillarbox", verbosity=0)

    def test_a_migration_is_missing_nothing(self) -> None:
        call_command("makemigrations", "--check", "--dry-run", verbosity=0)
        script = StringIO()
        call_command("sqlmigrate", "pillarbox", "0001", stdout=script)
        self.assertIn("shop_event", script.getvalue())


@skipIf(connection.vendor == "sqlite", "no server can end its connections")
class HandlersTest(TransactionTestCase):
    def test_a_connection_that_the_server_ended_is_made_anew(self) -> None:
        own, seen = Handlers(), []

        @own.on("first", "second")
        def look(event: Event) -> None:
            if event.type == "first":
                self.end_by_server()
                with self.assertRaises(DatabaseError):
                    Order.objects.count()
            else:
                seen.append(Order.objects.count())

        def work() -> None:
            connection.settings_dict["CONN_MAX_AGE"] = None  # else it is closed for its age
            deliver(own, [outbox.event("first", {}), outbox.event("second", {})])
            connection.close()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
        self.assertEqual(seen, [0])

    def end_by_server(self) -> None:
        ask, kill = {
            "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend(%s)"),
            "mysql": ("SELECT connection_id()", "KILL %s"),
        }[connection.vendor]
        with connection.cursor() as cursor:
            cursor.execute(ask)
            ((number,),) = cursor.fetchall()
        other = connection.copy()
        with other.cursor() as cursor:
            cursor.execute(kill, [number])
        other.close()


class AdminTest(TransactionTestCase):
    def setUp(self) -> None:
        clear_outbox()
        self.anna = User.objects.create_superuser("anna")
        self.client.force_login(self.anna)

    def die(self, count: int = 3) -> list[Any]:
        for _ in range(count):
            post("/orders", "poison")
        with self.assertLogs("pillarbox", "ERROR"):
            relay_events()
        return list(rows.DeadLetter.objects.order_by("id"))

    def listed(self, model: str, query: str = "") -> str:
        answer = self.client.get(reverse(f"admin:pillarbox_{model}_changelist") + query, follow=True)
        self.assertEqual(answer.status_code, 200)
        return str(answer.content.decode())

    def act(self, action: str, letters: list[Any], **others: str) -> Any:
        page = self.listed("deadletter")
        places = re.findall(r'name="_selected_action" value="([^"]+)"', page)
        chosen = [place.replace("&quot;", '"') for place in places if any(str(row.id) in place for row in letters)]
        self.assertEqual(len(chosen), len(letters))
        data = {"action": action, "_selected_action": chosen, **others}
        return self.client.post(reverse("admin:pillarbox_deadletter_changelist"), data, follow=True)

    def test_pages_are_not_counted(self) -> None:
        with transaction.atomic():
            outbox.add_all(connection, [outbox.event("e", {}, key=number) for number in range(120)])
        with self.reading_pages_only():
            first, last = self.listed("event"), self.listed("event", "?p=3")
            self.assertIn("?p=2", self.listed("event", "?p=999"), "the first page")
            self.listed("event", "?all=")
            filtered = self.listed("event", "?status__exact=published")
        self.assertEqual((first.count("/change/"), last.count("/change/"), filtered.count("/change/")), (50, 20, 0))
        self.assertIn("?p=2", first)
        self.assertNotIn("?p=3", first)

    def reading_pages_only(self) -> Any:
        def watch(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            self.assertFalse("shop_event" in sql and ("COUNT(" in sql or "LIMIT" not in sql), sql)
            return execute(sql, params, many, context)

        return connection.execute_wrapper(watch)

    def test_an_event_is_shown_and_cannot_be_changed(self) -> None:
        post("/orders", "a secret lamp")
        (event,) = written_events()
        self.assertIn(str(event.key), self.listed("event", f"?q={event.id}"))
        self.assertIn("not an event", self.listed("event", "?q=seven"))
        url = re.findall(r'href="(/admin/pillarbox/event/[^"]+/change/)', self.listed("event"))[0]
        self.assertIn("a secret lamp", self.client.get(url).content.decode())
        self.assertEqual(self.client.post(url, {}).status_code, 403)
        self.assertEqual(self.client.get("/admin/pillarbox/event/add/").status_code, 403)
        bob = User.objects.create_user("bob", is_staff=True)
        bob.user_permissions.add(Permission.objects.get(codename="view_event"))
        self.client.force_login(bob)
        shown = self.client.get(url).content.decode()
        self.assertIn(str(event.id), shown)
        self.assertNotIn("a secret lamp", shown)
        self.assertEqual(self.client.get("/admin/pillarbox/deadletter/").status_code, 403)
        with self.assertRaisesRegex(ConfigError, "write events with"):
            rows.Event.objects.get().save()
        with self.assertRaisesRegex(ConfigError, "prunes"):
            rows.Event.objects.get().delete()

    def test_dead_letters_are_replayed(self) -> None:
        letters = self.die()
        self.assertContains(self.act("replay", letters[:2]), "2 dead letters were replayed.")
        self.assertEqual([row.id for row in rows.DeadLetter.objects.all()], [letters[2].id])
        self.assertEqual(len(written_events()), 2)
        with connection.cursor() as cursor:
            cursor.execute("SELECT operator, action FROM shop_audit")
            self.assertEqual({tuple(row) for row in cursor.fetchall()}, {("anna", "replay")})

    def test_a_dead_letter_can_be_decided_on_its_own_page(self) -> None:
        letters = self.die(2)
        (url,) = (
            found
            for found in re.findall(r'href="([^"]+/change/)', self.listed("deadletter"))
            if str(letters[0].id) in found
        )
        page = self.client.get(url).content.decode()
        (place,) = re.findall(r'name="_selected_action" value="([^"]+)"', page)
        self.assertEqual(re.findall(r'name="action" value="(\w+)"', page), ["replay", "discard"])
        data = {"action": "replay", "_selected_action": place.replace("&quot;", '"')}
        answer = self.client.post(reverse("admin:pillarbox_deadletter_changelist"), data, follow=True)
        self.assertContains(answer, "1 dead letter was replayed.")
        self.assertEqual([row.id for row in rows.DeadLetter.objects.all()], [letters[1].id])

    def test_a_discard_is_confirmed(self) -> None:
        letters = self.die(2)
        asked = self.act("discard", letters[:1])
        self.assertContains(asked, "Discard 1 dead letter")
        self.assertEqual(rows.DeadLetter.objects.count(), 2)
        self.assertContains(self.act("discard", letters[:1], confirmed="yes"), "1 dead letter was discarded.")
        self.assertEqual([row.id for row in rows.DeadLetter.objects.all()], [letters[1].id])

    def test_actions_need_their_permissions(self) -> None:
        letters = self.die(1)
        bob = User.objects.create_user("bob", is_staff=True)
        bob.user_permissions.add(Permission.objects.get(codename="view_deadletter"))
        self.client.force_login(bob)
        self.assertNotIn("Replay", self.listed("deadletter"))
        (url,) = re.findall(r'href="([^"]+/change/)', self.listed("deadletter"))
        self.assertNotIn('name="action"', self.client.get(url).content.decode())
        place = f'["{letters[0].id}","default",""]'
        data = {"action": "discard", "_selected_action": [place], "confirmed": "yes"}
        self.client.post(reverse("admin:pillarbox_deadletter_changelist"), data)
        self.assertEqual(rows.DeadLetter.objects.count(), 1)


class SettingsTest(TestCase):
    def test_wrong_settings_are_named(self) -> None:
        for setting, sentence in (
            ({"strem": "x"}, "unknown key 'strem'; did you mean 'stream'"),
            ({"DATABASE": "x"}, "unknown key 'DATABASE'; did you mean 'database'"),
            ({"streams": {"mail": {"too": "x"}}}, "unknown setting 'too'; did you mean 'to'"),
            ({"database": "defualt"}, "'defualt', which is not in DATABASES; did you mean 'default'"),
            ({"prefix": "7"}, "cannot name a table"),
            ([], "is a list"),
        ):
            with override_settings(PILLARBOX=setting), self.assertRaises(Exception) as caught:
                call_command("check", verbosity=0)
            said = str(caught.exception)
            self.assertIn(sentence, said.replace("\n\tHINT: ", "; "))
