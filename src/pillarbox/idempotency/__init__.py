"""HTTP idempotency keys: a repeated request has one effect and gets the same answer."""

from pillarbox.idempotency.idempotency import Idempotency
from pillarbox.idempotency.reply import Reply
from pillarbox.idempotency.requests import Request

__all__ = ["Idempotency", "Reply", "Request"]
