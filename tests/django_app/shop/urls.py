"""The views of the shop."""

import json
from typing import Any

from django.contrib import admin
from django.db import connection, connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path

from pillarbox import Idempotency, Outbox
from tests.django_app.shop.models import Order

outbox = Outbox(prefix="shop")
once = Idempotency(connections, scope=lambda request: request.headers.get("X-User", "anna"), prefix="shop")


def order(request: HttpRequest) -> HttpResponse:
    made = Order.objects.create(item=json.loads(request.body)["item"])
    outbox.add(connection, "order.created", {"item": made.item}, key=made.pk)
    response = JsonResponse({"id": made.pk}, status=409 if made.item == "sold out" else 201)
    response.set_cookie("seen", "yes")
    return response


def forgetful(request: HttpRequest) -> HttpResponse:
    return order(request)


def streamed(request: HttpRequest) -> Any:
    order(request)
    return StreamingHttpResponse(["a", "b"])


async def awaited(request: HttpRequest) -> HttpResponse:
    outbox.add(connection, "order.created", {}, key=1)
    return HttpResponse()


urlpatterns = [
    path("admin/", admin.site.urls),
    path("orders", transaction.atomic(order)),
    path("once", once.view(order)),
    path("forgetful", forgetful),
    path("streamed", once.view(streamed)),
    path("awaited", awaited),
]
