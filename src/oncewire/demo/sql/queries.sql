-- What the demo chat asks, by name.

-- name: lock
-- $1 conversation. Until the end of the transaction nobody else asks about this conversation or adds to it here.
SELECT pg_advisory_xact_lock(hashtextextended('oncewire-demo:' || $1::text, 0));

-- name: find_sent
-- $1 conversation, $2 key. The message that the page sent under this key, if it is stored already.
SELECT id::text AS message_id, sequence FROM conversation_messages
    WHERE conversation_id = $1::uuid AND metadata ->> 'key' = $2;

-- name: find_answer
-- $1 conversation, $2 question. Whether a question has its answer.
SELECT 1 FROM conversation_messages
    WHERE conversation_id = $1::uuid AND role = 'assistant' AND metadata ->> 'question' = $2;

-- name: find_unanswered
-- The conversations of the demo whose last message is a question, of the last day: whoever wrote the answer died.
SELECT m.conversation_id::text AS conversation, m.id::text AS question, m.sequence, m.content
    FROM conversations c JOIN conversation_messages m ON m.conversation_id = c.id AND m.sequence = c.last_sequence
    WHERE m.role = 'user' AND m.metadata ? 'key' AND m.created_at > now() - interval '1 day'
    ORDER BY m.created_at LIMIT 100;

-- name: make_tour
-- Where the tour keeps its prices and charges. Nothing but the ledger keeps an order from being charged twice.
CREATE SCHEMA IF NOT EXISTS oncewire_tour;
CREATE TABLE IF NOT EXISTS oncewire_tour.prices (item text PRIMARY KEY, cents integer NOT NULL);
CREATE TABLE IF NOT EXISTS oncewire_tour.charges (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text NOT NULL, tour text NOT NULL, cents integer NOT NULL
);

-- name: set_price
-- $1 item, $2 cents.
INSERT INTO oncewire_tour.prices VALUES ($1, $2) ON CONFLICT (item) DO UPDATE SET cents = excluded.cents;

-- name: forget_price
-- $1 item.
DELETE FROM oncewire_tour.prices WHERE item = $1;

-- name: count_charges
-- $1 tour. Charges, and orders that were charged: the same number when none was charged twice.
SELECT count(*) AS charges, count(DISTINCT id) AS orders FROM oncewire_tour.charges WHERE tour = $1;

-- name: make_shop
-- Where the shop of `up --demo` keeps its prices and charges. The key proves that no order is charged twice.
CREATE SCHEMA IF NOT EXISTS oncewire_shop;
CREATE TABLE IF NOT EXISTS oncewire_shop.prices (item text PRIMARY KEY, cents integer NOT NULL);
CREATE TABLE IF NOT EXISTS oncewire_shop.charges (id text PRIMARY KEY, item text NOT NULL, cents integer NOT NULL);

-- name: set_shop_price
-- $1 item, $2 cents.
INSERT INTO oncewire_shop.prices VALUES ($1, $2) ON CONFLICT (item) DO UPDATE SET cents = excluded.cents;
