"""A small chat on the public parts: what `oncewire up` shows to whoever opens its address.

    page/       the page, on the JavaScript client (clients/js)
    chat        takes messages from the page, stores them through the outbox, and answers them
    answers     what it answers

It listens with the gateway, on this machine only, and knows no users: a page that you copy from, not a product.
"""

from oncewire.demo.chat import Chat

__all__ = ["Chat"]
