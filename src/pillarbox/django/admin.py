"""The admin: events and dead letters to look at, and dead letters to replay or discard."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import quote
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.core.paginator import InvalidPage
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.timezone import is_aware, localtime

from pillarbox import operations
from pillarbox.django.configuration import configuration
from pillarbox.django.models import PAYLOAD, DeadLetter, Event
from pillarbox.django.paging import UncountedPaginator
from pillarbox.errors import PillarboxError
from pillarbox.event import Status
from pillarbox.sql.rows import error_history
from pillarbox.store import Filter, Store

_PAYLOAD_CHARACTERS: Final = 20_000
_MOST_STREAMS: Final = 50
_MOST_PAGES: Final = 1000
_EMPTY: Final = "-"
_DONE: Final = {"replay": "replayed", "discard": "discarded"}


class Place(NamedTuple):
    """The identity of a row, as it stands in a link or a checkbox. consumer: only of dead letters."""

    id: UUID
    stream: str
    consumer: str = ""

    @classmethod
    def of(cls, row: Any) -> "Place":
        return cls(row.id, row.stream, getattr(row, "consumer", ""))

    @classmethod
    def parsed(cls, text: str) -> "Place | None":
        try:
            id, stream, consumer = json.loads(text)
            return cls(UUID(id), str(stream), str(consumer))
        except (TypeError, ValueError):
            return None

    def __str__(self) -> str:
        return json.dumps([str(self.id), self.stream, self.consumer], separators=(",", ":"))


class Rows(ChangeList):
    def get_results(self, request: HttpRequest) -> None:
        # Not Django's own: for what it takes for the only page, also one behind the last, it reads all rows.
        paginator = self.model_admin.get_paginator(request, self.queryset, self.list_per_page)
        try:
            shown = paginator.page(self.page_num)
        except InvalidPage:
            raise IncorrectLookupParameters from None
        self.paginator, self.result_list, self.multi_page = paginator, shown.object_list, shown.has_other_pages()
        # The same number: the page then shows no number of results, which would be that of the pages so far.
        self.result_count = self.full_result_count = paginator.count
        self.show_full_result_count = self.can_show_all = False
        self.show_admin_actions = True

    def url_for_result(self, result: Any) -> str:
        options = self.opts
        return reverse(
            f"admin:{options.app_label}_{options.model_name}_change",
            args=(quote(str(Place.of(result))),),
            current_app=self.model_admin.admin_site.name,
        )


class StreamFilter(admin.SimpleListFilter):
    """By the streams that are known, which are few."""

    title = "stream"
    parameter_name = "stream"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        streams = configuration().names.parts["stream"]
        alias = configuration().alias
        with connections[alias].cursor() as cursor:
            cursor.execute(f"SELECT name FROM {streams} ORDER BY name LIMIT {_MOST_STREAMS}")
            found = {name for (name,) in cursor.fetchall()}
        # No relay has told of a stream that none serves. Each question takes one step in an index.
        waiting, after = Event._default_manager.using(alias).filter(status=Status.PENDING.value).order_by("stream"), ""
        while len(found) < _MOST_STREAMS:
            after = waiting.filter(stream__gt=after).values_list("stream", flat=True).first() or ""
            if not after:
                break
            found.add(after)
        return [(name, name) for name in sorted(found)]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(stream=self.value()) if self.value() else queryset


if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin  # generic for type checkers only


class RowAdmin(_ModelAdmin):
    """Rows that only Pillarbox writes."""

    list_per_page = 50
    # Nothing that reads the whole table: no counts, no list of everything, no other order.
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by = ()
    # By id: those that Pillarbox makes are in order of time, and the order has an index on every database.
    ordering = ("-id",)
    search_fields = ("id",)
    search_help_text = "The whole id of an event."
    empty_value_display = _EMPTY
    actions_selection_counter = False

    def get_queryset(self, request: HttpRequest) -> Any:
        # Payloads may be large, and secret.
        rows = self.model._default_manager.using(configuration().alias)
        return rows.defer("payload", "errors", "headers").order_by(*self.ordering)

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if not search_term.strip():
            return queryset, False
        try:
            return queryset.filter(id=UUID(search_term.strip())), False
        except ValueError:
            self.message_user(request, "That is not an event's id.", messages.WARNING)
            return queryset.none(), False

    def get_paginator(self, request: HttpRequest, queryset: Any, per_page: int, *_: Any, **__: Any) -> Any:
        text = request.GET.get(PAGE_VAR, "1")
        page = int(text) if text.isdecimal() and len(text) < 9 else 1
        # A database reads all rows before those of a page.
        return UncountedPaginator(queryset, per_page, page if page <= _MOST_PAGES else 1)

    def get_changelist(self, request: HttpRequest, **_: Any) -> type[ChangeList]:
        return Rows

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        place = Place.parsed(object_id)
        if place is None:
            return None
        own = {"consumer": place.consumer} if self.model is DeadLetter else {}
        rows = self.model._default_manager.using(configuration().alias)
        return rows.filter(id=place.id, stream=place.stream, **own).first()

    def action_checkbox(self, obj: Any) -> SafeString:
        return format_html(
            '<input type="checkbox" name="{}" value="{}" class="action-select" aria-label="Select this row">',
            ACTION_CHECKBOX_NAME,
            str(Place.of(obj)),
        )

    action_checkbox.short_description = ""  # type: ignore[attr-defined]

    def has_add_permission(self, request: HttpRequest, *_: Any) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return [name for _, options in self.get_fieldsets(request, obj) for name in options["fields"]]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        payload = ("payload_text",) if request.user.has_perm(PAYLOAD) else ()  # type: ignore[union-attr]
        return [
            (title, {"fields": (*fields, *payload) if title == "Content" else fields}) for title, fields in self.shown
        ]

    shown: Sequence[tuple[str | None, Sequence[Any]]] = ()

    @admin.display(description="headers")
    def headers_text(self, row: Any) -> str:
        return row.headers or _EMPTY

    @admin.display(description="payload")
    def payload_text(self, row: Any) -> str:
        data = bytes(row.payload)
        try:
            text = data.decode()
            if row.content_type.startswith("application/json"):
                text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        except ValueError:
            text = f"{len(data):,} bytes that are no text: {data[:100].hex(' ')}"
        return _block(Truncator(text).chars(_PAYLOAD_CHARACTERS))

    @admin.display(description="history of errors")
    def history(self, row: Any) -> str:
        lines = [
            f"{entry.get('at', '')}  attempt {entry.get('attempts', '?')}  {entry.get('error', '')}"
            for entry in error_history(row.errors)
        ]
        return _block("\n".join(lines)) if lines else _EMPTY


def _block(text: str) -> str:
    return format_html('<pre style="white-space: pre-wrap; margin: 0">{}</pre>', text)


def _instant(name: str, title: str | None = None) -> Any:
    """A field with an instant to the second, in the time zone of the project."""

    @admin.display(description=title or name.replace("_", " "))
    def shown(row: Any) -> str:
        value = getattr(row, name)
        if value is None:
            return _EMPTY
        text = f"{localtime(value) if is_aware(value) else value:%Y-%m-%d %H:%M:%S}"
        return format_html('<span style="white-space: nowrap">{}</span>', text)

    return shown


_CREATED: Final = _instant("created_at")
_OCCURRED: Final = _instant("occurred_at")
_AVAILABLE: Final = _instant("available_at")
_NEXT: Final = _instant("next_attempt_at")
_PUBLISHED: Final = _instant("published_at")
_LAST_ERROR: Final = _instant("last_error_at")
_DIED: Final = _instant("died_at")
_REPLAY: Final = _instant("replay_at", "replay asked for at")
_IDENTITY: Final = ("type", "id", "seq", "stream", "tenant", "topic", "key")
_ABOUT: Final = ("aggregate_type", "aggregate_id", "aggregate_version", "routing_key")
_CONTENT: Final = ("content_type", "schema_id", "schema_version", "headers_text")


@admin.register(Event)
class EventAdmin(RowAdmin):
    list_display = ("type", "key", "stream", "status", _CREATED, _PUBLISHED, "attempts")
    list_filter = ("status", StreamFilter)
    shown = (
        (None, (*_IDENTITY, "status")),
        ("About", _ABOUT),
        ("Instants", (_CREATED, _OCCURRED, _AVAILABLE, _NEXT, _PUBLISHED)),
        ("Attempts", ("attempts", "max_attempts", _LAST_ERROR, "last_error", "history")),
        ("Content", _CONTENT),
    )


@admin.register(DeadLetter)
class DeadLetterAdmin(RowAdmin):
    list_display = ("type", "key", "stream", "short_error", _DIED, "attempts", "who")
    list_filter = (StreamFilter,)
    actions = ("replay", "discard")
    shown = (
        (None, (*_IDENTITY, "consumer")),
        ("About", _ABOUT),
        ("Instants", (_CREATED, _OCCURRED, _AVAILABLE, _DIED, _REPLAY)),
        ("Attempts", ("attempts", "max_attempts", "error", "history")),
        ("Content", _CONTENT),
    )

    @admin.display(description="consumer")
    def who(self, row: DeadLetter) -> str:
        return f"{row.consumer} (replay asked for)" if row.replay_at else row.consumer

    @admin.display(description="error")
    def short_error(self, row: DeadLetter) -> str:
        return format_html(
            '<span style="display: inline-block; min-width: 16em; overflow-wrap: anywhere">{}</span>',
            Truncator(row.error).chars(120),
        )

    def render_change_form(self, request: HttpRequest, context: Any, *others: Any, **options: Any) -> Any:
        context["decisions"] = [name for name in self.get_actions(request) if name in _DONE]
        context |= {"place": str(Place.of(context["original"])), "checkbox": ACTION_CHECKBOX_NAME}
        return super().render_change_form(request, context, *others, **options)

    def response_action(self, request: HttpRequest, queryset: Any, *others: Any, **options: Any) -> Any:
        # Django chooses by the primary key, which is the id without its stream.
        if ACTION_CHECKBOX_NAME in request.POST:
            data = request.POST.copy()
            data["select_across"] = "1"
            request.POST = data  # type: ignore[assignment]
        return super().response_action(request, queryset.none(), *others, **options)

    def has_replay_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("pillarbox.replay_deadletter")  # type: ignore[union-attr]

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("pillarbox.discard_deadletter")  # type: ignore[union-attr]

    @admin.action(description="Replay: give them another run of attempts", permissions=["replay"])
    def replay(self, request: HttpRequest, queryset: Any) -> None:
        self._decide(request, "replay")

    @admin.action(description="Discard: give them up for good", permissions=["discard"])
    def discard(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        if request.POST.get("confirmed"):
            self._decide(request, "discard")
            return None
        places = _chosen(request)
        found = self.get_queryset(request).filter(id__in=[place.id for place in places])
        context = {
            **self.admin_site.each_context(request),
            "title": "Discard dead letters",
            "opts": self.opts,
            "rows": [row for row in found if Place.of(row) in places],
            "places": [str(place) for place in places],
            "checkbox": ACTION_CHECKBOX_NAME,
        }
        return TemplateResponse(request, "admin/pillarbox/discard.html", context)

    def _decide(self, request: HttpRequest, action: str) -> None:
        places, by = _chosen(request), request.user.get_username()
        by_stream: dict[tuple[str, str], list[UUID]] = defaultdict(list)
        for place in places:
            by_stream[place.stream, place.consumer].append(place.id)
        change = operations.replay if action == "replay" else operations.discard

        async def work(store: Store) -> int:
            changed = 0
            for (stream, consumer), ids in by_stream.items():
                changed += (await change(store, Filter(stream=stream, consumer=consumer, ids=ids), by)).changed
            return changed

        try:
            changed = _on_store(work)
        except PillarboxError as error:
            self.message_user(request, f"Nothing was {_DONE[action]}: {error}.", messages.ERROR)
            return
        one = "1 dead letter was" if changed == 1 else f"{changed:,} dead letters were"
        gone = (
            "" if changed == len(places) else f" {len(places) - changed:,} of the chosen ones are no dead letters now."
        )
        self.message_user(request, f"{one} {_DONE[action]}.{gone}", messages.WARNING if gone else messages.SUCCESS)


def _chosen(request: HttpRequest) -> Sequence[Place]:
    found = map(Place.parsed, request.POST.getlist(ACTION_CHECKBOX_NAME))
    return [place for place in found if place is not None]


def _on_store(work: Callable[[Store], Coroutine[Any, Any, int]]) -> int:
    """Run an operator's work on the store, which has connections of its own."""

    async def run() -> int:
        store = configuration().store()
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())
