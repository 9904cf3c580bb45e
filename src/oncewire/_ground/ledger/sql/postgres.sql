-- The statements of the PostgreSQL ledger. {s} is the schema: a handler may set its own search_path.

-- name: add_meta
-- The ledger's id and format are made at the first opening. Of two processes that open it first, one makes them.
INSERT INTO {s}.ledger_meta (name, value) VALUES ('id', %(id)s), ('format', %(format)s) ON CONFLICT DO NOTHING;

-- name: meta
-- A statement of its own, after `add_meta`: it sees what that one waited for.
SELECT name, value FROM {s}.ledger_meta;

-- name: note
INSERT INTO {s}.ledger_meta (name, value) VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: noted
SELECT value FROM {s}.ledger_meta WHERE name = %s;

-- name: add_chain
INSERT INTO {s}.ledger_chains (agent, number, hash, state, base, base_hash, base_state)
VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING;

-- name: chain
SELECT chain FROM {s}.ledger_chains WHERE agent = %s;

-- name: identity
-- A copy of the cluster has another address but the same identifier; a dump restored elsewhere has another one.
SELECT system_identifier::text, (SELECT oid FROM pg_database WHERE datname = current_database())::text
FROM pg_control_system();

-- name: open_group
-- From here on a COMMIT fails, until the agent closes the group.
INSERT INTO {s}.ledger_open VALUES (nextval('{s}.ledger_groups')) RETURNING group_id;

-- name: close_group
DELETE FROM {s}.ledger_open WHERE group_id = %s;

-- name: claim
-- The keys come sorted: two transactions that share some of them meet at the same one first.
INSERT INTO {s}.ledger_inbox (key, group_id)
SELECT key, %s FROM unnest(%s::bytea[]) AS asked (key) ON CONFLICT DO NOTHING;

-- name: settled
-- A statement after `claim`: it sees what a transaction committed that `claim` waited for.
SELECT key, group_id FROM {s}.ledger_inbox WHERE key = ANY(%s) AND group_id <> %s;

-- name: places
SELECT group_id, number, keys FROM {s}.ledger_blocks WHERE group_id = ANY(%s);

-- name: give_back
DELETE FROM {s}.ledger_inbox WHERE key = ANY(%s) AND group_id = %s;

-- name: lock_chain
-- Held to the end of the transaction: numbers follow the order of commits.
SELECT number, hash, state, confirmed, confirmed_streams FROM {s}.ledger_chains WHERE chain = %s FOR UPDATE;

-- name: append
WITH grown AS (
    UPDATE {s}.ledger_chains SET number = %(number)s, hash = %(hash)s, state = %(state)s WHERE chain = %(chain)s
)
INSERT INTO {s}.ledger_blocks (chain, number, group_id, entries, effects, keys, content, announcement)
VALUES (
    %(chain)s, %(number)s, %(group_id)s, %(entries)s, %(effects)s, %(keys)s, %(content)s, %(announcement)s
);

-- name: delay
INSERT INTO {s}.ledger_delayed (id, agent, due_ms, sending)
SELECT id, %s, due_ms, sending FROM unnest(%s::text[], %s::bigint[], %s::bytea[]) AS given (id, due_ms, sending)
ON CONFLICT DO NOTHING;

-- name: mark
INSERT INTO {s}.ledger_marks AS known (chain, block, first, last, stream, sequence)
SELECT %s, block, first, max(last), min(stream), max(sequence)
FROM unnest(%s::bigint[], %s::integer[], %s::integer[], %s::text[], %s::bigint[])
    AS given (block, first, last, stream, sequence)
GROUP BY block, first
ON CONFLICT (chain, block, first) DO UPDATE
SET last = greatest(known.last, excluded.last), sequence = greatest(known.sequence, excluded.sequence);

-- name: marks
SELECT block, first, last, stream, sequence FROM {s}.ledger_marks WHERE chain = %s;

-- name: blocks_after
SELECT number, effects FROM {s}.ledger_blocks WHERE chain = %s AND number > %s ORDER BY number;

-- name: confirm
WITH gone AS (
    DELETE FROM {s}.ledger_marks WHERE chain = %(chain)s AND block <= %(block)s
)
UPDATE {s}.ledger_chains SET confirmed = %(block)s, confirmed_streams = %(streams)s::jsonb WHERE chain = %(chain)s;

-- name: begun
INSERT INTO {s}.ledger_attempts (key, agent, stream, consumer, sequence, deliveries, started_ms, error)
SELECT key, %s, stream, consumer, sequence, deliveries, started_ms, error
FROM unnest(%s::bytea[], %s::text[], %s::text[], %s::bigint[], %s::integer[], %s::bigint[], %s::text[])
    AS given (key, stream, consumer, sequence, deliveries, started_ms, error)
ON CONFLICT (key) DO UPDATE SET stream = excluded.stream, consumer = excluded.consumer, sequence = excluded.sequence,
    deliveries = excluded.deliveries, started_ms = excluded.started_ms, error = excluded.error;

-- name: renew_attempts
-- In key order, as `begun` writes them: no two transactions wait for each other.
UPDATE {s}.ledger_attempts SET started_ms = %s WHERE key IN (
    SELECT key FROM {s}.ledger_attempts WHERE key = ANY(%s) ORDER BY key FOR UPDATE
);

-- name: attempts
SELECT key, stream, consumer, sequence, deliveries, started_ms, error FROM {s}.ledger_attempts WHERE agent = %s;

-- name: forget_attempts
-- In key order, as `begun` writes them: no two transactions wait for each other.
DELETE FROM {s}.ledger_attempts WHERE key IN (
    SELECT key FROM {s}.ledger_attempts WHERE key = ANY(%s) ORDER BY key FOR UPDATE
);

-- name: call_result
SELECT result FROM {s}.ledger_calls WHERE key = %s AND name = %s;

-- name: keep_call
INSERT INTO {s}.ledger_calls (key, name, result) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING;

-- name: due
-- What another process is just taking is its own.
SELECT due_ms, sending FROM {s}.ledger_delayed WHERE agent = %s AND due_ms <= %s ORDER BY due_ms LIMIT %s
FOR UPDATE SKIP LOCKED;

-- name: waiting
SELECT due_ms, sending FROM {s}.ledger_delayed WHERE agent = %s ORDER BY due_ms;

-- name: next_due
SELECT min(due_ms) FROM {s}.ledger_delayed WHERE agent = %s;

-- name: drop_due
-- What another process is just taking is its own.
DELETE FROM {s}.ledger_delayed WHERE id IN (
    SELECT id FROM {s}.ledger_delayed WHERE id = ANY(%s) ORDER BY id FOR UPDATE SKIP LOCKED
) RETURNING id;

-- name: forget_keys
-- In key order: no two processes that forget the same wait for each other. A key that was settled anew stays.
DELETE FROM {s}.ledger_inbox WHERE key IN (
    SELECT key FROM {s}.ledger_inbox WHERE key = ANY(%(keys)s) AND group_id IN (
        SELECT group_id FROM {s}.ledger_blocks WHERE chain = %(chain)s AND number <= %(number)s
    ) ORDER BY key FOR UPDATE
);

-- name: forget_calls
DELETE FROM {s}.ledger_calls WHERE key = ANY(%s);

-- name: forget
-- Of two processes that forget at once the later one may come with less.
WITH gone AS (
    DELETE FROM {s}.ledger_blocks WHERE chain = %(chain)s AND number <= %(number)s
)
UPDATE {s}.ledger_chains SET base = %(number)s, base_hash = %(hash)s, base_state = %(state)s
WHERE chain = %(chain)s AND base < %(number)s;

-- name: head
SELECT number, hash, state FROM {s}.ledger_chains WHERE chain = %s;

-- name: base
SELECT base, base_hash, base_state FROM {s}.ledger_chains WHERE chain = %s;

-- name: confirmed
SELECT confirmed, confirmed_streams FROM {s}.ledger_chains WHERE chain = %s;

-- name: block
SELECT content, announcement FROM {s}.ledger_blocks WHERE chain = %s AND number = %s;

-- name: hold_name
-- For as long as this session lives.
SELECT pg_try_advisory_lock(%s, hashtext(%s));

-- name: left_behind
-- A lock that can be had is nobody's: its process is gone.
SELECT process FROM {s}.ledger_processes
WHERE agent = %s AND process <> %s AND pg_try_advisory_xact_lock(%s, hashtext(process));

-- name: enter
INSERT INTO {s}.ledger_processes (process, agent, started_ms) VALUES (%s, %s, %s)
ON CONFLICT (process) DO UPDATE SET started_ms = excluded.started_ms;

-- name: leave
DELETE FROM {s}.ledger_processes WHERE process = ANY(%s);
