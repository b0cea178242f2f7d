"""What the shop does with its events."""

from typing import Any

from django.db import connections

from pillarbox import Event, Inbox
from pillarbox.django import Handlers
from tests.django_app.shop.models import Order

handlers = Handlers()
inbox = Inbox("mailer", prefix="shop")


@handlers.on("order.created")
@inbox.once(connections)
def send_mail(event: Event, tx: Any) -> None:
    order = Order.objects.get(pk=int(event.key or 0))
    if order.item == "poison":
        raise ValueError("nobody can mail this")
    order.mails += 1
    order.save()


@handlers.on("order.looked_at")
async def look(event: Event) -> None:
    order = await Order.objects.aget(pk=int(event.key or 0))
    order.mails += 10
    await order.asave()
