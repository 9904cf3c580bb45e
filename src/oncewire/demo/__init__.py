"""What shows Oncewire to newcomers, on the public parts: a chat that `oncewire up` serves, a shop, a tour.

    page/       the page, on the JavaScript client (clients/js)
    chat        takes messages from the page, stores them through the outbox, and answers them
    answers     what it answers
    shop        `oncewire up --demo`: orders, and an agent that charges them
    tour        `oncewire demo`: every part in turn, counted from outside
    biller      the agent that the tour kills

The chat listens with the gateway, on this machine only, and knows no users: a page that you copy from, not a product.
"""

from oncewire.demo.chat import Chat

__all__ = ["Chat"]
