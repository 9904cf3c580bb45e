-- The general outbox: MessageEnvelope 1.0 to any subject. The idempotency key is the message's hash and its Nats-Msg-Id.
--
-- No order is promised between transactions: an identity column hands out numbers before the commit. A row is marked as
-- sent, in a commit of its own, before it is published; a relay that dies in between leaves a row that the next one
-- looks for in the stream once the duplicate window may have forgotten its id.

CREATE TABLE outbox_messages (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subject text NOT NULL,
    body text NOT NULL,
    idempotency_key text NOT NULL UNIQUE,
    traceparent text,
    status text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'dispatched', 'failed')),
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

COMMENT ON COLUMN outbox_messages.claimed_until IS 'Until then one relay alone works on it.';
COMMENT ON COLUMN outbox_messages.sent_after IS 'The last sequence of sent_stream before it was published.';

CREATE INDEX outbox_messages_open ON outbox_messages (id) WHERE status <> 'dispatched';

CREATE FUNCTION enqueue_message(p_subject text, p_envelope json, p_traceparent text DEFAULT NULL)
RETURNS bigint LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    v_id bigint;
    v_key text;
    v_subject text;
    v_bytes bigint := 2048 + octet_length(p_envelope::text);
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
    v_key := p_envelope ->> 'idempotency_key';
    IF coalesce(p_envelope ->> 'schema_version', '') <> '1.0'
        OR v_key IS NULL OR v_key !~ '^[[:print:]]+$' OR length(v_key) > 512 THEN
        RAISE EXCEPTION 'the envelope is no MessageEnvelope 1.0 with an idempotency_key' USING ERRCODE = 'OW400';
    END IF;
    SELECT body_bytes_max INTO v_bytes_max FROM relay_state;
    IF v_bytes > v_bytes_max THEN
        RAISE EXCEPTION 'the message takes % bytes, % can be published', v_bytes, v_bytes_max
            USING ERRCODE = 'OW413', HINT = 'Store large content elsewhere and enqueue its address.';
    END IF;
    INSERT INTO outbox_messages (subject, body, idempotency_key, traceparent)
        VALUES (p_subject, p_envelope::text, v_key, p_traceparent)
        ON CONFLICT (idempotency_key) DO NOTHING RETURNING id INTO v_id;
    IF v_id IS NULL THEN
        SELECT id, subject INTO v_id, v_subject FROM outbox_messages WHERE idempotency_key = v_key;
        IF v_subject <> p_subject THEN
            RAISE EXCEPTION '% was enqueued for % before', v_key, v_subject USING ERRCODE = 'OW409',
                HINT = 'One message goes to one subject: make a second message with an id of its own.';
        END IF;
    END IF;
    PERFORM wake_relay();
    RETURN v_id;
END $$;
