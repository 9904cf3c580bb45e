"""Commit an order and the message that tells about it in one transaction: Django's `transaction.atomic`.

Run it beside `oncewire up`, in the same folder:  python examples/outbox_django.py
"""

import uuid
from urllib.parse import parse_qsl, urlsplit

import django
from django.conf import settings

from oncewire import outbox
from oncewire.embedded import postgres_url

address = urlsplit(postgres_url())
database = {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": address.path.lstrip("/"),
    "USER": address.username,
    "PASSWORD": address.password,
    "HOST": address.hostname,
    "PORT": address.port,
    "OPTIONS": dict(parse_qsl(address.query)),
}
settings.configure(DATABASES={"default": database})
django.setup()

from django.db import connection, transaction  # noqa: E402 - Django wants its settings first


def main() -> None:
    conversation = uuid.uuid4()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE IF NOT EXISTS orders (id serial PRIMARY KEY, item text)")
            cursor.execute("INSERT INTO orders (item) VALUES ('a bicycle')")
        done = outbox.enqueue(connection, conversation, role="assistant", content="Your bicycle is ordered.")
    print(f"message {done.sequence} of {conversation}")


main()
