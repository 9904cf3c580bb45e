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
    sent_at timestamptz,
    sent_stream text,
    sent_after bigint,
    dispatched_at timestamptz
) WITH (fillfactor = 80);

COMMENT ON COLUMN outbox_messages.sent_after IS 'The last sequence of sent_stream before it was published.';

CREATE INDEX outbox_messages_open ON outbox_messages (id) WHERE status <> 'dispatched';
CREATE INDEX outbox_messages_done ON outbox_messages (dispatched_at) WHERE status = 'dispatched';

CREATE FUNCTION enqueue_message(p_subject text, p_envelope json, p_traceparent text DEFAULT NULL)
RETURNS bigint LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    v_id bigint;
    v_key text := p_envelope ->> 'idempotency_key';
    v_bytes bigint := octet_length(p_envelope::text);
    v_bytes_max bigint;
BEGIN
    IF p_subject IS NULL OR p_subject !~ '^[^[:space:][:cntrl:].*>]+(\.[^[:space:][:cntrl:].*>]+)*$' OR octet_length(p_subject) > 1024 THEN
        RAISE EXCEPTION 'this is not a subject to publish on: %', left(coalesce(p_subject, 'null'), 80)
            USING ERRCODE = 'OW400', HINT = 'Tokens joined by single dots, without wildcards, spaces or control characters.';
    END IF;
    IF p_subject LIKE 'sr.queries.%' OR p_subject LIKE 'dlq.%' THEN
        RAISE EXCEPTION '% cannot be published to through the outbox', p_subject
            USING ERRCODE = 'OW400', HINT = 'Queries are requests; dead letters are written by the DLQ service alone.';
    END IF;
    IF coalesce(p_envelope ->> 'schema_version', '') <> '1.0' OR v_key IS NULL OR v_key = '' THEN
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
        SELECT id INTO v_id FROM outbox_messages WHERE idempotency_key = v_key;
    END IF;
    PERFORM wake_relay();
    RETURN v_id;
END $$;
