-- The outbox: what a transaction wants to say is a row of it, and a relay brings it to JetStream once it is committed.
--
-- Conversations: messages in order. A conversation's numbers are handed out under a lock on its own row, so that the
-- order of sequences is the order of commits: a reader that resumes after 42 has really seen 41. Relays never lock that
-- row. They claim conversations through rows of their own (conversation_relay), so that a slow relay cannot make a user's
-- commit wait.
--
-- The general outbox: MessageEnvelope 1.0 to any subject. No order is promised between transactions, since an identity
-- column hands out numbers before the commit. A row is marked as sent, in a commit of its own, before it is published: a
-- relay that dies in between leaves a row that the next one looks for in the stream once the duplicate window may have
-- forgotten its id.
--
-- Services may write all of this by their own SQL too. So what a column may hold is said here and not only by the
-- functions, and as types: PostgreSQL reads and plans the CHECKs of a table anew for every statement that touches it,
-- those of a type once per session. With 32 writers, CHECKs of tables were an eighth of what an enqueue takes.

CREATE DOMAIN conversation_tenant AS text CHECK (VALUE ~ '^[!-~]{0,128}$');
CREATE DOMAIN conversation_role AS text CHECK (VALUE IN ('user', 'assistant', 'system'));
CREATE DOMAIN conversation_length AS bigint CHECK (VALUE >= 0);
CREATE DOMAIN message_sequence AS bigint CHECK (VALUE > 0);
CREATE DOMAIN outbox_status AS text CHECK (VALUE IN ('pending', 'dispatched', 'failed'));

CREATE TABLE conversations (
    id uuid PRIMARY KEY,
    tenant conversation_tenant NOT NULL DEFAULT '',
    epoch text NOT NULL DEFAULT replace(gen_random_uuid()::text, '-', ''),
    last_sequence conversation_length NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

COMMENT ON COLUMN conversations.tenant IS 'Travels in a header: printable ASCII without spaces.';
COMMENT ON COLUMN conversations.epoch IS 'Changes when the numbers can no longer be trusted: after a restore.';

CREATE TABLE conversation_messages (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    conversation_id uuid NOT NULL REFERENCES conversations (id),
    sequence message_sequence NOT NULL,
    role conversation_role NOT NULL,
    content text NOT NULL,
    model text,
    citations jsonb,
    pubmed_articles jsonb,
    metadata jsonb,
    void_reason text,
    created_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (conversation_id, sequence)
);

COMMENT ON COLUMN conversation_messages.id IS 'The dedupe id of the published message too.';
COMMENT ON COLUMN conversation_messages.void_reason IS 'Set by a person: a tombstone is published under this sequence.';

CREATE TABLE message_outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    conversation_id uuid NOT NULL,
    sequence bigint NOT NULL,
    message_id uuid NOT NULL UNIQUE,
    body_bytes integer NOT NULL,
    traceparent text,
    status outbox_status NOT NULL DEFAULT 'pending',
    attempts integer NOT NULL DEFAULT 0,
    next_attempt_at timestamptz,
    error text,
    created_at timestamptz NOT NULL DEFAULT now(),
    dispatched_at timestamptz
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.2);

COMMENT ON TABLE message_outbox IS 'Narrow: the body is in conversation_messages.';
COMMENT ON COLUMN message_outbox.body_bytes IS 'What the published message takes at most; a relay bounds its batches by it.';
COMMENT ON COLUMN message_outbox.traceparent IS 'The trace in which the message was enqueued.';

-- No index on dispatched_at: every mark would pay for it. Ids grow with time, and purging walks them from the oldest.
CREATE INDEX message_outbox_open ON message_outbox (conversation_id, sequence) WHERE status <> 'dispatched';

CREATE TABLE conversation_relay (
    conversation_id uuid PRIMARY KEY,
    dispatched_sequence bigint NOT NULL DEFAULT 0,
    stream_sequence bigint NOT NULL DEFAULT 0,
    attempts integer NOT NULL DEFAULT 0,
    next_attempt_at timestamptz,
    error text
) WITH (fillfactor = 50);

COMMENT ON COLUMN conversation_relay.stream_sequence IS 'Where the last confirmed row is in the stream: the fence.';

CREATE FUNCTION make_conversation_relay() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO conversation_relay (conversation_id) VALUES (NEW.id) ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;

-- A trigger, since services also make conversations by their own INSERT.
CREATE TRIGGER conversation_is_relayed AFTER INSERT ON conversations
    FOR EACH ROW EXECUTE FUNCTION make_conversation_relay();

CREATE TABLE outbox_messages (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subject text NOT NULL,
    body text NOT NULL,
    idempotency_key text NOT NULL UNIQUE,
    traceparent text,
    status outbox_status NOT NULL DEFAULT 'pending',
    attempts integer NOT NULL DEFAULT 0,
    next_attempt_at timestamptz,
    error text,
    created_at timestamptz NOT NULL DEFAULT now(),
    claimed_until timestamptz,
    sent_at timestamptz,
    sent_stream text,
    sent_after bigint,
    dispatched_at timestamptz
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.2);

COMMENT ON COLUMN outbox_messages.idempotency_key IS 'The message''s hash, and its Nats-Msg-Id.';
COMMENT ON COLUMN outbox_messages.claimed_until IS 'Until then one relay alone works on it.';
COMMENT ON COLUMN outbox_messages.sent_after IS 'The last sequence of sent_stream before it was published.';

CREATE INDEX outbox_messages_open ON outbox_messages (id) WHERE status <> 'dispatched';

CREATE TABLE relay_state (
    is_single boolean PRIMARY KEY DEFAULT true CHECK (is_single),
    idle_until timestamptz NOT NULL DEFAULT '-infinity',
    body_bytes_max bigint NOT NULL DEFAULT 1032192
) WITH (fillfactor = 10);

COMMENT ON TABLE relay_state IS 'What relays tell writers: whether a wake-up is worth it, and how large a body may be.';

INSERT INTO relay_state DEFAULT VALUES;

CREATE FUNCTION wake_relay() RETURNS void LANGUAGE sql SET search_path FROM CURRENT AS $$
    -- A notification in every transaction would serialise all commits: only an idle relay asks for one.
    SELECT pg_notify('oncewire_outbox', '') FROM relay_state WHERE idle_until > clock_timestamp();
$$;

CREATE FUNCTION enqueue_conversation_message(
    p_conversation_id uuid,
    p_role text,
    p_content text,
    p_model text DEFAULT NULL,
    p_citations jsonb DEFAULT NULL,
    p_pubmed_articles jsonb DEFAULT NULL,
    p_metadata jsonb DEFAULT NULL,
    p_tenant text DEFAULT '',
    p_traceparent text DEFAULT NULL
) RETURNS TABLE (message_id uuid, sequence bigint) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    v_sequence bigint;
    v_tenant text;
    v_id uuid := gen_random_uuid();
    v_bytes bigint;
    v_bytes_max bigint;
    v_is_idle boolean;
BEGIN
    IF p_conversation_id IS NULL OR p_content IS NULL THEN
        RAISE EXCEPTION 'a message needs a conversation and a content' USING ERRCODE = 'OW400';
    END IF;
    IF p_role IS NULL OR p_role NOT IN ('user', 'assistant', 'system') THEN
        RAISE EXCEPTION 'role must be user, assistant or system, not %', coalesce(p_role, 'null')
            USING ERRCODE = 'OW400', HINT = 'Use one of the three roles of the protocol.';
    END IF;
    IF p_metadata IS NOT NULL AND jsonb_typeof(p_metadata) NOT IN ('object', 'null') THEN
        RAISE EXCEPTION 'metadata must be an object' USING ERRCODE = 'OW400';
    END IF;
    IF p_tenant IS NULL OR p_tenant !~ '^[!-~]{0,128}$' THEN
        RAISE EXCEPTION 'this is no tenant: %', left(coalesce(p_tenant, 'null'), 80)
            USING ERRCODE = 'OW400', HINT = 'Use at most 128 printable ASCII characters without spaces.';
    END IF;
    -- 2,048 is more than headers, names and ids of an envelope take.
    v_bytes := 2048 + octet_length(to_json(p_content)::text) + coalesce(octet_length(to_json(p_model)::text), 0)
        + coalesce(octet_length(p_citations::text), 0) + coalesce(octet_length(p_metadata::text), 0);
    SELECT body_bytes_max, idle_until > clock_timestamp() INTO v_bytes_max, v_is_idle FROM relay_state;
    IF v_bytes > v_bytes_max THEN
        RAISE EXCEPTION 'the message takes % bytes, % can be published', v_bytes, v_bytes_max
            USING ERRCODE = 'OW413', HINT = 'Store large content elsewhere and enqueue its address.';
    END IF;
    UPDATE conversations c SET last_sequence = c.last_sequence + 1 WHERE c.id = p_conversation_id
        RETURNING c.last_sequence, c.tenant INTO v_sequence, v_tenant;
    IF NOT FOUND THEN
        INSERT INTO conversations AS c (id, tenant, last_sequence) VALUES (p_conversation_id, p_tenant, 1)
            ON CONFLICT (id) DO UPDATE SET last_sequence = c.last_sequence + 1
            RETURNING c.last_sequence, c.tenant INTO v_sequence, v_tenant;
    END IF;
    IF v_tenant <> p_tenant THEN
        RAISE EXCEPTION 'conversation % belongs to another tenant', p_conversation_id USING ERRCODE = 'OW403';
    END IF;
    INSERT INTO conversation_messages
        (id, conversation_id, sequence, role, content, model, citations, pubmed_articles, metadata)
        VALUES (v_id, p_conversation_id, v_sequence, p_role, p_content, p_model, p_citations, p_pubmed_articles, p_metadata);
    INSERT INTO message_outbox (conversation_id, sequence, message_id, body_bytes, traceparent)
        VALUES (p_conversation_id, v_sequence, v_id, v_bytes, left(p_traceparent, 255));
    IF v_is_idle THEN
        PERFORM pg_notify('oncewire_outbox', '');
    END IF;
    message_id := v_id;
    sequence := v_sequence;
    RETURN NEXT;
END $$;

-- Canonical JSON as contracts/canonical.py writes it: members in order of UTF-16 code units, whole numbers with all their
-- digits, fractions as ECMAScript writes them. These three are called by the functions below, which set the search path.

CREATE FUNCTION canonical_fraction(p_value float8) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT AS $$
DECLARE
    v_parts text[] := regexp_match(p_value::text, '^-?(\d+)(?:\.(\d+))?(?:e([+-]\d+))?$');
    v_sign text := CASE WHEN p_value < 0 THEN '-' ELSE '' END;
    v_digits text := ltrim(v_parts[1] || coalesce(v_parts[2], ''), '0');
    v_exponent integer := coalesce(v_parts[3], '0')::integer - length(coalesce(v_parts[2], ''));
    v_point integer;
    v_shorter numeric;
BEGIN
    IF p_value = 0 THEN
        RETURN '0';
    END IF;
    -- PostgreSQL writes one digit more than ECMAScript where a text lies exactly between two doubles, such as 1e23.
    FOREACH v_shorter IN ARRAY ARRAY[div(v_digits::numeric, 10), div(v_digits::numeric, 10) + 1] LOOP
        IF length(v_digits) > 15 AND abs(p_value) BETWEEN 1e-40 AND 1e40
            AND (v_sign || v_shorter || 'e' || v_exponent + 1)::float8 = p_value THEN
            v_digits := v_shorter::text;
            v_exponent := v_exponent + 1;
        END IF;
    END LOOP;
    v_point := length(v_digits) + v_exponent;
    v_digits := rtrim(v_digits, '0');
    IF length(v_digits) <= v_point AND v_point <= 21 THEN
        RETURN v_sign || rpad(v_digits, v_point, '0');
    ELSIF 0 < v_point AND v_point <= 21 THEN
        RETURN v_sign || left(v_digits, v_point) || '.' || substr(v_digits, v_point + 1);
    ELSIF -6 < v_point AND v_point <= 0 THEN
        RETURN v_sign || '0.' || repeat('0', -v_point) || v_digits;
    END IF;
    RETURN v_sign || left(v_digits, 1) || coalesce('.' || nullif(substr(v_digits, 2), ''), '')
        || 'e' || CASE WHEN v_point > 0 THEN '+' ELSE '' END || v_point - 1;
END $$;

CREATE FUNCTION canonical_scalar(p_value json) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE json_typeof(p_value)
        WHEN 'string' THEN to_json(p_value #>> '{}')::text
        WHEN 'number' THEN
            CASE WHEN p_value::text = '-0' THEN '0' WHEN p_value::text ~ '^-?\d+$' THEN p_value::text
                ELSE canonical_fraction(p_value::text::float8) END
        ELSE p_value::text
    END;
$$;

CREATE FUNCTION canonical_json(p_value json) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    IF json_typeof(p_value) = 'object' THEN
        RETURN (
            SELECT '{' || coalesce(string_agg(to_json(key)::text || ':' || CASE WHEN json_typeof(value) IN ('object', 'array')
                    THEN canonical_json(value) ELSE canonical_scalar(value) END, ','
                ORDER BY CASE WHEN octet_length(key) = length(key) THEN key
                    ELSE regexp_replace(key, '([\uE000-\uFFFF])', U&'\+10FFFF' || '\1', 'g') END COLLATE "C"), '') || '}'
            FROM json_each(p_value)
        );
    ELSIF json_typeof(p_value) = 'array' THEN
        RETURN (
            SELECT '[' || coalesce(string_agg(canonical_json(value), ',' ORDER BY place), '') || ']'
            FROM json_array_elements(p_value) WITH ORDINALITY AS element(value, place)
        );
    END IF;
    RETURN canonical_scalar(p_value);
END $$;

CREATE FUNCTION message_idempotency_key(p_message_type text, p_message_id text, p_payload json)
RETURNS text LANGUAGE sql IMMUTABLE STRICT SET search_path FROM CURRENT AS $$
    SELECT 'sha256:' || encode(sha256(convert_to(
        '{"message_id":' || to_json(p_message_id)::text || ',"message_type":' || to_json(p_message_type)::text
            || ',"payload":' || canonical_json(p_payload) || '}', 'UTF8')), 'hex');
$$;
COMMENT ON FUNCTION message_idempotency_key IS 'The idempotency key of a MessageEnvelope.';

CREATE FUNCTION enqueue_message(p_subject text, p_envelope json, p_traceparent text DEFAULT NULL)
RETURNS bigint LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    v_id bigint;
    v_body text := p_envelope::text;
    v_sent record;
    v_type text;
    v_message_id text;
    v_key text;
    v_flaw text;
    v_derived text;
    v_known outbox_messages;
    v_bytes bigint;
    v_bytes_max bigint;
BEGIN
    IF p_subject IS NULL OR octet_length(p_subject) > 1024
        OR p_subject !~ '^[^[:space:][:cntrl:].*>]+(\.[^[:space:][:cntrl:].*>]+)*$' THEN
        RAISE EXCEPTION 'this is not a subject to publish on: %', left(coalesce(p_subject, 'null'), 80)
            USING ERRCODE = 'OW400', HINT = 'Tokens joined by single dots, without wildcards, spaces or control characters.';
    END IF;
    IF p_subject ~ '^(sr\.queries|dlq|\$[^.]*|_INBOX)\.' THEN
        RAISE EXCEPTION '% cannot be published to through the outbox', p_subject USING ERRCODE = 'OW400',
            HINT = 'Queries are requests, dead letters are the DLQ service''s alone, and $ and _INBOX belong to NATS.';
    END IF;
    IF p_envelope IS NULL OR json_typeof(p_envelope) <> 'object' THEN
        RAISE EXCEPTION 'the envelope is no object' USING ERRCODE = 'OW400';
    END IF;
    SELECT * INTO v_sent FROM json_to_record(p_envelope) AS sent (
        schema_version json, message_type json, message_id json, event_id json, "timestamp" json, actor_id json,
        actor_kind json, payload json, idempotency_key json);
    v_sent.message_id := coalesce(v_sent.message_id, v_sent.event_id);
    v_type := v_sent.message_type #>> '{}';
    v_message_id := v_sent.message_id #>> '{}';
    v_key := v_sent.idempotency_key #>> '{}';
    v_flaw := CASE
        WHEN v_sent.schema_version::text IS DISTINCT FROM '"1.0"' THEN 'schema_version'
        WHEN json_typeof(v_sent.message_type) IS DISTINCT FROM 'string' OR length(v_type) NOT BETWEEN 1 AND 256
            THEN 'message_type'
        WHEN json_typeof(v_sent.message_id) IS DISTINCT FROM 'string' OR length(v_message_id) > 512
            OR v_message_id !~ '^[[:print:]]+$' THEN 'message_id'
        WHEN v_sent.timestamp IS NULL OR v_sent.timestamp::text !~ '^".*([Zz]|[+-]00(:?00)?)"$' THEN 'timestamp (in UTC)'
        WHEN json_typeof(v_sent.actor_id) IS DISTINCT FROM 'string'
            OR length(v_sent.actor_id #>> '{}') NOT BETWEEN 1 AND 512 THEN 'actor_id'
        WHEN coalesce(v_sent.actor_kind::text, '') NOT IN ('"HUMAN"', '"AGENT"', '"SYSTEM"')
            THEN 'actor_kind (HUMAN, AGENT or SYSTEM)'
        WHEN json_typeof(v_sent.payload) IS DISTINCT FROM 'object' THEN 'payload (an object)'
        WHEN p_envelope -> 'idempotency_key' IS NOT NULL AND (json_typeof(v_sent.idempotency_key) IS DISTINCT FROM 'string'
            OR length(v_key) > 512 OR v_key !~ '^[[:print:]]+$') THEN 'idempotency_key'
    END;
    IF v_flaw IS NOT NULL THEN
        RAISE EXCEPTION 'this is no MessageEnvelope 1.0: it has no valid %', v_flaw USING ERRCODE = 'OW400';
    END IF;
    IF v_key IS NULL OR v_key ~ '^sha256:[0-9a-f]{64}$' THEN
        v_derived := message_idempotency_key(v_type, v_message_id, v_sent.payload);
        IF v_key <> v_derived THEN
            RAISE EXCEPTION 'the idempotency_key is not that of the message, which is %', v_derived
                USING ERRCODE = 'OW400', HINT = 'Leave it out, or make it by message_idempotency_key(type, id, payload).';
        ELSIF v_key IS NULL THEN
            v_key := v_derived;
            v_body := regexp_replace(v_body, '\s*\}\s*$', ', "idempotency_key": "' || v_key || '"}');
        END IF;
    END IF;
    v_bytes := 2048 + octet_length(v_body);
    SELECT body_bytes_max INTO v_bytes_max FROM relay_state;
    IF v_bytes > v_bytes_max THEN
        RAISE EXCEPTION 'the message takes % bytes, % can be published', v_bytes, v_bytes_max
            USING ERRCODE = 'OW413', HINT = 'Store large content elsewhere and enqueue its address.';
    END IF;
    INSERT INTO outbox_messages (subject, body, idempotency_key, traceparent)
        VALUES (p_subject, v_body, v_key, p_traceparent)
        ON CONFLICT (idempotency_key) DO NOTHING RETURNING id INTO v_id;
    IF v_id IS NULL THEN
        SELECT * INTO v_known FROM outbox_messages WHERE idempotency_key = v_key;
        IF v_known.subject <> p_subject THEN
            RAISE EXCEPTION '% was enqueued for % before', v_key, v_known.subject USING ERRCODE = 'OW409',
                HINT = 'One message goes to one subject: make a second message with an id of its own.';
        ELSIF v_known.body <> v_body AND (v_known.body::json ->> 'message_type' <> v_type
            OR canonical_json(v_known.body::json -> 'payload') <> canonical_json(v_sent.payload)) THEN
            RAISE EXCEPTION '% was enqueued with another type or payload before', v_key USING ERRCODE = 'OW409',
                HINT = 'Leave the key out: then each message has one of its own.';
        END IF;
        v_id := v_known.id;
    END IF;
    PERFORM wake_relay();
    RETURN v_id;
END $$;

CREATE FUNCTION mark_outbox_dispatched(p_id bigint) RETURNS void LANGUAGE sql SET search_path FROM CURRENT AS $$
    UPDATE message_outbox
        SET status = 'dispatched', dispatched_at = clock_timestamp(), attempts = attempts + 1,
            next_attempt_at = NULL, error = NULL
        WHERE id = p_id AND status <> 'dispatched';
$$;

CREATE FUNCTION mark_outbox_failed(p_id bigint, p_error text) RETURNS void LANGUAGE sql SET search_path FROM CURRENT AS $$
    -- The row and its conversation wait together: 1, 2, 4 … seconds, at most 5 minutes.
    WITH failed AS (
        UPDATE message_outbox
            SET status = 'failed', attempts = attempts + 1, error = left(p_error, 2000),
                next_attempt_at = clock_timestamp() + make_interval(secs => least(300, power(2, least(attempts, 9))))
            WHERE id = p_id AND status <> 'dispatched'
            RETURNING conversation_id, attempts, next_attempt_at, error
    )
    UPDATE conversation_relay r
        SET attempts = f.attempts, next_attempt_at = f.next_attempt_at, error = f.error
        FROM failed f WHERE r.conversation_id = f.conversation_id;
$$;
