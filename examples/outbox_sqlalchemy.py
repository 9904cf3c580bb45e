"""Commit an order and the message that tells about it in one transaction: SQLAlchemy, Session and AsyncSession.

Run it beside `oncewire up`, in the same folder:  python examples/outbox_sqlalchemy.py
"""

import asyncio
import uuid

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from oncewire import outbox
from oncewire.embedded import postgres_url

URL = postgres_url().replace("postgresql://", "postgresql+psycopg://", 1)
CONVERSATION = uuid.uuid4()


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


def main() -> None:
    engine = create_engine(URL)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Order(item="a bicycle"))
        done = outbox.enqueue(session, CONVERSATION, role="assistant", content="Your bicycle is ordered.")
    engine.dispose()
    print(f"message {done.sequence} of {CONVERSATION}")


async def main_async() -> None:
    engine = create_async_engine(URL)
    async with AsyncSession(engine) as session, session.begin():
        session.add(Order(item="a bell"))
        done = await outbox.enqueue_async(session, CONVERSATION, role="assistant", content="Your bell is ordered.")
    await engine.dispose()
    print(f"message {done.sequence} of {CONVERSATION}")


main()
asyncio.run(main_async())
