"""Messages that no decoder could read: the event that stands for one, and the message that is read once more."""

from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from pillarbox.event import Event, Status
from pillarbox.ids import stable_id
from pillarbox.source import Lane, Message

UNREADABLE_TYPE: Final = "pillarbox.unreadable"  # of the dead letter
_BINARY: Final = "application/octet-stream"
_ID_HEADER: Final = "message_id"
_REPLAYED: Final = Lane("replay")


def id_of_place(message: Message) -> UUID:
    """An id that each delivery of this message has again, if the broker has places for messages."""
    return stable_id("place", message.topic, message.place or f"{message.lane.name}/{message.position}")


def text_of(value: bytes) -> str | None:
    """None: it is no text."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def key_text(key: bytes) -> str:
    """A key as text: equal keys have equal texts, and a key that is no text has that of its bytes."""
    text = text_of(key)
    return "0x" + key.hex() if text is None or "\0" in text else text


def unreadable(message: Message) -> Event:
    """The event that stands for a message that no decoder could read, so that it can be a dead letter."""
    headers = {
        name: text
        for name, value in message.headers
        if (text := text_of(value)) is not None and "\0" not in text and "\0" not in name
    }
    if message.message_id:
        # An event has no place for the broker's own field, in which the id of the message may be.
        headers.setdefault(_ID_HEADER, message.message_id)
    now = message.written_at or datetime.now(UTC)
    key = None if message.key is None else key_text(message.key)
    return Event(
        id_of_place(message), 0, "default", message.topic, UNREADABLE_TYPE, None, None, None, key, None,
        message.body, message.content_type or _BINARY, None, None, now, 0, None, now, headers, "default",
        Status.PENDING, None,
    )  # fmt: skip


def message_of(event: Event) -> Message:
    """The message that an unreadable event stands for, to be read once more. Its lane and position are gone."""
    return Message(
        _REPLAYED,
        0,
        event.topic,
        None if event.key is None else event.key.encode(),
        event.payload,
        [(name, value.encode()) for name, value in event.headers.items()],
        None if event.content_type == _BINARY else event.content_type,
        event.headers.get(_ID_HEADER),
        event.created_at,
    )


def with_id_of_letter(decoded: Event, letter: Event) -> Event:
    """What was decoded of ``message_of(letter)``. If its place is its id, that is the place of the first delivery."""
    is_by_place = decoded.id == id_of_place(message_of(letter))
    return decoded._replace(id=letter.id) if is_by_place else decoded
