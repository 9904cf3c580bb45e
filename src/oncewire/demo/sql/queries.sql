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
