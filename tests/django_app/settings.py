"""The settings of the shop. The databases come from the environment, because Django reads them once."""

import json
import os
from pathlib import Path

from tests.django_app.databases import database_of, use_pymysql

use_pymysql()
FOLDER = Path(os.environ["SHOP_FOLDER"])
TEST = {"TEST": json.loads(os.environ.get("SHOP_TEST", "{}"))}

DATABASES = {
    "default": database_of(os.environ["SHOP_URL"], **TEST),
    # No app may make its tables here.
    "bare": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": FOLDER / "bare.sqlite3",
        "TEST": {"NAME": FOLDER / "bare-test.sqlite3"},
    },
}
DATABASE_ROUTERS = ["tests.django_app.shop.routers.OnlyDefault"]
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "pillarbox.django",
    "tests.django_app.shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ROOT_URLCONF = "tests.django_app.shop.urls"
SECRET_KEY = "tests"  # noqa: S105
STATIC_URL = "static/"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PILLARBOX = {"prefix": "shop", "to": "tests.django_app.shop.handlers:handlers", "max_attempts": 1}
