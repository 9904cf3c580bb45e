-- What a column may hold, as types instead of CHECKs. PostgreSQL reads and plans the CHECKs of a table anew for every
-- statement, whichever columns it touches; those of a type once per session, and only for columns that are written. With
-- 32 writers the CHECKs were an eighth of what an enqueue takes.
--
-- The tables are written anew, so this waits for their writers and takes as long as a copy of them.

CREATE DOMAIN conversation_tenant AS text CHECK (VALUE ~ '^[!-~]{0,128}$');
CREATE DOMAIN conversation_role AS text CHECK (VALUE IN ('user', 'assistant', 'system'));
CREATE DOMAIN conversation_length AS bigint CHECK (VALUE >= 0);
CREATE DOMAIN message_sequence AS bigint CHECK (VALUE > 0);
CREATE DOMAIN outbox_status AS text CHECK (VALUE IN ('pending', 'dispatched', 'failed'));

ALTER TABLE conversations
    DROP CONSTRAINT conversations_tenant_check,
    DROP CONSTRAINT conversations_last_sequence_check,
    ALTER tenant TYPE conversation_tenant,
    ALTER last_sequence TYPE conversation_length;

ALTER TABLE conversation_messages
    DROP CONSTRAINT conversation_messages_role_check,
    DROP CONSTRAINT conversation_messages_sequence_check,
    ALTER role TYPE conversation_role,
    ALTER sequence TYPE message_sequence;

ALTER TABLE message_outbox
    DROP CONSTRAINT message_outbox_status_check,
    ALTER status TYPE outbox_status;

ALTER TABLE outbox_messages
    DROP CONSTRAINT outbox_messages_status_check,
    ALTER status TYPE outbox_status;

-- A message's own id is its dedupe id too: it is as unique, lives longer than the outbox row (what a reader of the history
-- is told is what the stream said), and each random id costs a PostgreSQL without OpenSSL three calls of the kernel.
CREATE OR REPLACE FUNCTION enqueue_conversation_message(
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
    INSERT INTO message_outbox (conversation_id, sequence, message_id, dedupe_id, body_bytes, traceparent)
        VALUES (p_conversation_id, v_sequence, v_id, v_id, v_bytes, left(p_traceparent, 255));
    IF v_is_idle THEN
        PERFORM pg_notify('oncewire_outbox', '');
    END IF;
    message_id := v_id;
    sequence := v_sequence;
    RETURN NEXT;
END $$;
