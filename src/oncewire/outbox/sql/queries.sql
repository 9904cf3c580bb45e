-- What the relay and the command line ask, by name. $n are the parameters, in the order of the description.

-- name: begin_claim
-- The claim is held for the length of one publish. Marks may be lost in a crash of PostgreSQL: the stream's own fence
-- (10071) finds them again, so they need not be waited for. Statistics of a table that is filled and emptied all day
-- are always wrong, so the planner is left no choice but the indexes, and need not choose again in each pass. A relay that is stopped holds its claim until
-- PostgreSQL ends its session: when it is idle, or, stopped within a statement, which is not idle, when the whole
-- transaction is too long (PostgreSQL 17 and newer; before, until the process goes on or dies).
BEGIN;
SET LOCAL synchronous_commit = off;
SET LOCAL lock_timeout = '5s';
SET LOCAL idle_in_transaction_session_timeout = '30s';
SELECT set_config('transaction_timeout', '60s', true) WHERE current_setting('server_version_num')::int >= 170000;
SET LOCAL plan_cache_mode = force_generic_plan;
SET LOCAL enable_seqscan = off;
SET LOCAL enable_bitmapscan = off;
SET LOCAL enable_hashjoin = off;
SET LOCAL enable_mergejoin = off;
SET LOCAL jit = off;

-- name: begin_durable
-- For what must be on disk before the next step.
BEGIN;
SET LOCAL synchronous_commit = on;
SET LOCAL lock_timeout = '5s';
SET LOCAL idle_in_transaction_session_timeout = '30s';
SELECT set_config('transaction_timeout', '60s', true) WHERE current_setting('server_version_num')::int >= 170000;

-- name: candidates
-- Conversations with open rows from $1 on, at most $2, in the order of their ids: one step of the index for each, however
-- many rows it has; those without open rows cost nothing.
WITH RECURSIVE open AS (
    (SELECT conversation_id AS id FROM message_outbox
        WHERE status <> 'dispatched' AND conversation_id >= $1 ORDER BY conversation_id LIMIT 1)
    UNION ALL
    SELECT (SELECT o.conversation_id FROM message_outbox o
        WHERE o.status <> 'dispatched' AND o.conversation_id > open.id ORDER BY o.conversation_id LIMIT 1)
    FROM open WHERE open.id IS NOT NULL
)
SELECT id::text FROM open WHERE id IS NOT NULL LIMIT $2

-- name: lock
-- Claim those of $1 that are due and that no other relay has. The rows are read by the next statement: only a fresh
-- snapshot sees what the relay before us has marked.
SELECT conversation_id::text, stream_sequence FROM conversation_relay
    WHERE conversation_id = ANY($1::text[]::uuid[]) AND (next_attempt_at IS NULL OR next_attempt_at <= clock_timestamp())
    FOR UPDATE SKIP LOCKED

-- name: read
-- Open rows of the conversations $1: at most $2 of each, $3 in all, about $4 bytes; in sequence within each.
WITH open AS MATERIALIZED (
    SELECT k.place, c.epoch, c.tenant, o.*,
            row_number() OVER at AS number, sum(o.body_bytes) OVER at AS bytes
        FROM unnest($1::text[]::uuid[]) WITH ORDINALITY AS k (id, place)
        JOIN conversations c ON c.id = k.id
        CROSS JOIN LATERAL (
            SELECT m.id, m.sequence, m.message_id, m.body_bytes, m.traceparent FROM message_outbox m
                WHERE m.conversation_id = k.id AND m.status <> 'dispatched' ORDER BY m.sequence LIMIT $2
        ) o
        WINDOW at AS (ORDER BY k.place, o.sequence ROWS UNBOUNDED PRECEDING)
)
SELECT o.place, o.id, o.sequence, replace(o.message_id::text, '-', ''), o.epoch, o.tenant,
        m.id::text, m.role, m.content, m.model, m.citations, m.metadata, m.void_reason, m.created_at,
        o.traceparent
    FROM open o
    JOIN conversation_messages m ON m.id = o.message_id
    WHERE o.number <= $3 AND (o.bytes <= $4 OR o.number = 1)
    ORDER BY o.number

-- name: mark
-- The rows $1 are in the stream; the conversations $2 stand at sequence $3 and stream sequence $4.
WITH done AS (
    UPDATE message_outbox
        SET status = 'dispatched', dispatched_at = statement_timestamp(), attempts = attempts + 1,
            next_attempt_at = NULL, error = NULL
        WHERE id = ANY($1::bigint[])
)
UPDATE conversation_relay r
    SET dispatched_sequence = s.sequence, stream_sequence = s.stream_sequence,
        attempts = 0, next_attempt_at = NULL, error = NULL
    FROM unnest($2::text[]::uuid[], $3::bigint[], $4::bigint[]) AS s (id, sequence, stream_sequence)
    WHERE r.conversation_id = s.id

-- name: mark_failed
-- Row $1 was refused with $2: its conversation stops here until the backoff is over or a person acts.
SELECT mark_outbox_failed($1, $2)

-- name: postpone
-- The conversation $1 cannot go on just now ($2), through no fault of its row: look again in $3 milliseconds.
UPDATE conversation_relay SET next_attempt_at = clock_timestamp() + $3 * interval '1 ms', error = left($2, 2000)
    WHERE conversation_id = $1

-- name: lock_numbers
-- Nobody gets a number in conversation $1 until the renumbering is committed.
SELECT last_sequence FROM conversations WHERE id = $1 FOR UPDATE

-- name: renumber_away
-- Out of the way first: the new numbers may overlap the old ones. $2 is the first open sequence.
WITH rows AS (
    UPDATE message_outbox SET sequence = sequence + (1::bigint << 50)
        WHERE conversation_id = $1 AND status <> 'dispatched' AND sequence >= $2
)
UPDATE conversation_messages SET sequence = sequence + (1::bigint << 50) WHERE conversation_id = $1 AND sequence >= $2

-- name: renumber_back
-- The open rows of $1 go up by $2.
WITH rows AS (
    UPDATE message_outbox SET sequence = sequence - (1::bigint << 50) + $2
        WHERE conversation_id = $1 AND status <> 'dispatched' AND sequence > (1::bigint << 50)
)
UPDATE conversation_messages SET sequence = sequence - (1::bigint << 50) + $2
    WHERE conversation_id = $1 AND sequence > (1::bigint << 50)

-- name: new_epoch
-- Conversation $1 counts on, $2 higher, under a new epoch; what stands in the stream up to $3 is not ours.
WITH counted AS (
    UPDATE conversations
        SET epoch = replace(gen_random_uuid()::text, '-', ''), last_sequence = last_sequence + $2
        WHERE id = $1
)
UPDATE conversation_relay SET stream_sequence = $3, next_attempt_at = NULL, error = NULL WHERE conversation_id = $1

-- name: advertise
-- A relay sleeps: writers may wake it for the next $1 milliseconds.
UPDATE relay_state SET idle_until = greatest(idle_until, clock_timestamp() + $1 * interval '1 ms')

-- name: work_has_come
-- Writers need not notify any more.
UPDATE relay_state SET idle_until = '-infinity' WHERE idle_until > clock_timestamp()

-- name: set_body_bytes_max
UPDATE relay_state SET body_bytes_max = $1 WHERE body_bytes_max <> $1

-- name: claim_messages
-- Up to $1 open messages of the general outbox, about $2 bytes, for this relay alone.
WITH due AS MATERIALIZED (
    SELECT id, subject, body, idempotency_key, traceparent, sent_stream, sent_after,
            extract(epoch FROM clock_timestamp() - sent_at)::float8 AS sent_age_s,
            extract(epoch FROM clock_timestamp() - created_at)::float8 AS waited_s
        FROM outbox_messages
        WHERE status <> 'dispatched'
            AND (next_attempt_at IS NULL OR next_attempt_at <= clock_timestamp())
            AND (claimed_until IS NULL OR claimed_until <= clock_timestamp())
        ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED
), counted AS (
    SELECT *, row_number() OVER at AS number, sum(octet_length(body)) OVER at AS bytes FROM due
        WINDOW at AS (ORDER BY id ROWS UNBOUNDED PRECEDING)
)
SELECT * FROM counted WHERE bytes <= $2 OR number = 1 ORDER BY id

-- name: mark_sent
-- Before anything is published: the messages $1 may from now on stand in the streams $2 behind the sequences $3. What
-- was sent before keeps its first mark. This relay has them for $4 milliseconds.
UPDATE outbox_messages m
    SET sent_at = coalesce(m.sent_at, clock_timestamp()), sent_stream = coalesce(m.sent_stream, s.stream),
        sent_after = coalesce(m.sent_after, s.after), claimed_until = clock_timestamp() + $4 * interval '1 ms'
    FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS s (id, stream, after)
    WHERE m.id = s.id

-- name: mark_sent_anew
-- They were looked for and are not in their stream: count from now, behind the sequences $2.
UPDATE outbox_messages m SET sent_at = clock_timestamp(), sent_after = s.after
    FROM unnest($1::bigint[], $2::bigint[]) AS s (id, after)
    WHERE m.id = s.id

-- name: mark_messages
-- The messages $1 are in their streams.
UPDATE outbox_messages
    SET status = 'dispatched', dispatched_at = statement_timestamp(), attempts = attempts + 1,
        next_attempt_at = NULL, claimed_until = NULL, error = NULL
    WHERE id = ANY($1::bigint[])

-- name: mark_messages_failed
-- The messages $1 were refused with $2: they wait 1, 2, 4 … seconds, at most 5 minutes.
UPDATE outbox_messages m
    SET status = 'failed', attempts = attempts + 1, error = left(s.error, 2000), claimed_until = NULL,
        next_attempt_at = clock_timestamp() + make_interval(secs => least(300, power(2, least(attempts, 9))))
    FROM unnest($1::bigint[], $2::text[]) AS s (id, error)
    WHERE m.id = s.id

-- name: release_messages
-- Not published, through no fault of their own: any relay may take the messages $1 again.
UPDATE outbox_messages SET claimed_until = NULL WHERE id = ANY($1::bigint[])

-- name: purge_message_outbox
-- One chunk behind id $1, of at most $3 rows: what was dispatched before $2 goes. Nothing behind a chunk that ends in
-- rows made after $2 can be due.
WITH chunk AS MATERIALIZED (
    SELECT id, status, dispatched_at, created_at FROM message_outbox WHERE id > $1 ORDER BY id LIMIT $3
), gone AS (
    DELETE FROM message_outbox o USING chunk c
        WHERE o.id = c.id AND c.status = 'dispatched' AND c.dispatched_at < $2 RETURNING 1
)
SELECT (SELECT max(id) FROM chunk) AS last_id, (SELECT max(created_at) FROM chunk) >= $2 AS is_end,
        (SELECT count(*) FROM gone) AS gone

-- name: purge_outbox_messages
-- The same for the general outbox.
WITH chunk AS MATERIALIZED (
    SELECT id, status, dispatched_at, created_at FROM outbox_messages WHERE id > $1 ORDER BY id LIMIT $3
), gone AS (
    DELETE FROM outbox_messages o USING chunk c
        WHERE o.id = c.id AND c.status = 'dispatched' AND c.dispatched_at < $2 RETURNING 1
)
SELECT (SELECT max(id) FROM chunk) AS last_id, (SELECT max(created_at) FROM chunk) >= $2 AS is_end,
        (SELECT count(*) FROM gone) AS gone

-- name: counts
-- Open rows of both outboxes and the age of the oldest.
SELECT 'conversations' AS outbox, count(*) FILTER (WHERE status = 'pending') AS pending,
        count(*) FILTER (WHERE status = 'failed') AS failed,
        coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float8 AS oldest_s
    FROM message_outbox WHERE status <> 'dispatched'
UNION ALL
SELECT 'messages', count(*) FILTER (WHERE status = 'pending'), count(*) FILTER (WHERE status = 'failed'),
        coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float8
    FROM outbox_messages WHERE status <> 'dispatched'

-- name: stuck_conversations
-- Conversations that wait for another attempt, at most $1, those that wait longest first.
SELECT r.conversation_id::text, o.sequence, r.attempts, r.next_attempt_at, r.error, waiting.rows
    FROM conversation_relay r
    CROSS JOIN LATERAL (
        SELECT min(m.sequence) AS sequence FROM message_outbox m
            WHERE m.conversation_id = r.conversation_id AND m.status <> 'dispatched'
    ) o
    CROSS JOIN LATERAL (
        SELECT count(*) AS rows FROM message_outbox m
            WHERE m.conversation_id = r.conversation_id AND m.status <> 'dispatched'
    ) waiting
    WHERE r.error IS NOT NULL AND o.sequence IS NOT NULL
    ORDER BY r.attempts DESC, r.conversation_id LIMIT $1

-- name: stuck_messages
-- Failed messages of the general outbox, at most $1.
SELECT id, subject, idempotency_key, attempts, next_attempt_at, error FROM outbox_messages
    WHERE status = 'failed' ORDER BY id LIMIT $1

-- name: retry_conversation
-- Try $1 again at once.
UPDATE conversation_relay SET next_attempt_at = NULL WHERE conversation_id = $1 AND next_attempt_at IS NOT NULL

-- name: retry_all_conversations
UPDATE conversation_relay SET next_attempt_at = NULL WHERE next_attempt_at IS NOT NULL

-- name: retry_message
UPDATE outbox_messages SET next_attempt_at = NULL WHERE id = $1 AND status = 'failed'

-- name: retry_all_messages
UPDATE outbox_messages SET next_attempt_at = NULL WHERE status = 'failed'

-- name: lock_conversation
-- Wait until no relay is at work on conversation $1.
SELECT 1 FROM conversation_relay WHERE conversation_id = $1 FOR UPDATE

-- name: void
-- Publish a tombstone in the place of the open row $2 of conversation $1, for the reason $3.
WITH voided AS (
    UPDATE message_outbox SET status = 'pending', next_attempt_at = NULL, error = NULL
        WHERE conversation_id = $1 AND sequence = $2 AND status <> 'dispatched' RETURNING message_id
), freed AS (
    UPDATE conversation_relay SET next_attempt_at = NULL, error = NULL, attempts = 0
        WHERE conversation_id = $1 AND EXISTS (SELECT 1 FROM voided)
)
UPDATE conversation_messages m SET void_reason = $3 FROM voided WHERE m.id = voided.message_id RETURNING m.id

-- name: void_message
-- A message of the general outbox that shall not be published any more: nobody waits for its number, so it goes.
DELETE FROM outbox_messages WHERE id = $1 AND status = 'failed' RETURNING id

-- name: wake
SELECT wake_relay()

-- name: history
-- Messages of conversation $1 above sequence $2, at most $3, for tenant $4 (NULL: whoever's it is), in sequence. A
-- conversation that is known has a row with null in place of a message, should it have none. A message's own id is its
-- dedupe id.
SELECT m.sequence, replace(m.id::text, '-', ''), c.epoch, c.tenant, m.id::text, m.role, m.content, m.model, m.citations,
        m.metadata, m.void_reason, m.created_at
    FROM conversations c
    LEFT JOIN LATERAL (
        SELECT * FROM conversation_messages m WHERE m.conversation_id = c.id AND m.sequence > $2 ORDER BY m.sequence LIMIT $3
    ) m ON true
    WHERE c.id = $1::text::uuid AND ($4::text IS NULL OR c.tenant = $4)
    ORDER BY m.sequence

-- name: newest
-- The newest message of conversation $1 for tenant $2 (NULL: whoever's it is), and the epoch.
SELECT last_sequence, epoch FROM conversations WHERE id = $1::text::uuid AND ($2::text IS NULL OR tenant = $2)
