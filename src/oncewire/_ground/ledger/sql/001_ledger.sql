-- The ledger: chains of blocks, one block per group commit. Times are Unix milliseconds.

CREATE TABLE ledger_meta (
    name text PRIMARY KEY,
    value text NOT NULL
);

-- Each agent's chain: its end, where it begins (all before was forgotten), up to which block all effects are confirmed
-- and how far that reaches in each stream. Its row is the lock for the next number and hash.
CREATE TABLE ledger_chains (
    chain integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    agent text NOT NULL UNIQUE,
    number bigint NOT NULL,
    hash bytea NOT NULL,
    state bytea NOT NULL,
    base bigint NOT NULL,
    base_hash bytea NOT NULL,
    base_state bytea NOT NULL,
    confirmed bigint NOT NULL DEFAULT 0,
    confirmed_streams jsonb NOT NULL DEFAULT '{}'
);

-- Numbers of transactions: they tie a claimed key to the block that settles it, whose own number comes last.
CREATE SEQUENCE ledger_groups;

-- One row per group commit: the keys of its entries (16 bytes each), its content packed, its announcement.
CREATE TABLE ledger_blocks (
    chain integer NOT NULL,
    number bigint NOT NULL,
    group_id bigint NOT NULL UNIQUE,
    entries integer NOT NULL,
    effects integer NOT NULL,
    keys bytea NOT NULL,
    content bytea NOT NULL,
    announcement bytea NOT NULL,
    PRIMARY KEY (chain, number)
);
-- Compressing a megabyte per commit would take longer than writing it.
ALTER TABLE ledger_blocks ALTER COLUMN keys SET STORAGE EXTERNAL, ALTER COLUMN content SET STORAGE EXTERNAL;

-- Every settled input by its key. Of two processes that insert the same key the second waits for the first.
CREATE TABLE ledger_inbox (
    key bytea PRIMARY KEY,
    group_id bigint NOT NULL
);

-- Transactions of agents that are not at their end. A COMMIT that finds its row here was not the agent's own: it fails,
-- and all of the transaction is rolled back. Nothing here outlives a transaction, so it needs no log.
CREATE UNLOGGED TABLE ledger_open (
    group_id bigint PRIMARY KEY
);

CREATE FUNCTION ledger_check_end() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF EXISTS (SELECT FROM ledger_open WHERE group_id = NEW.group_id) THEN
        RAISE EXCEPTION 'a handler may not end the ledger''s transaction'
            USING ERRCODE = 'OW400', HINT = 'Leave COMMIT to the agent, and name the constraints of SET CONSTRAINTS.';
    END IF;
    RETURN NULL;
END
$$;

CREATE CONSTRAINT TRIGGER ledger_check_end AFTER INSERT ON ledger_open
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION ledger_check_end();

-- Which effects of a block are confirmed, as ranges; the announcement counts as the last effect.
CREATE TABLE ledger_marks (
    chain integer NOT NULL,
    block bigint NOT NULL,
    first integer NOT NULL,
    last integer NOT NULL,
    stream text NOT NULL,
    sequence bigint NOT NULL,
    PRIMARY KEY (chain, block, first)
);

-- Inputs that began or failed and are not settled: what a poison message leaves behind.
CREATE TABLE ledger_attempts (
    key bytea PRIMARY KEY,
    agent text NOT NULL,
    stream text NOT NULL,
    consumer text NOT NULL,
    sequence bigint NOT NULL,
    deliveries integer NOT NULL,
    started_ms bigint NOT NULL,
    error text NOT NULL
);

-- Results of calls to the outside, by input and name.
CREATE TABLE ledger_calls (
    key bytea NOT NULL,
    name text NOT NULL,
    result bytea NOT NULL,
    PRIMARY KEY (key, name)
);

-- Effects with a due time ahead.
CREATE TABLE ledger_delayed (
    id text PRIMARY KEY,
    agent text NOT NULL,
    due_ms bigint NOT NULL,
    sending bytea NOT NULL
);
CREATE INDEX ledger_delayed_due ON ledger_delayed (agent, due_ms);

-- Processes that run on this ledger. Each holds an advisory lock on its name for as long as its session lives; a row
-- without its lock was left by a process that did not stop cleanly, on whatever machine.
CREATE TABLE ledger_processes (
    process text PRIMARY KEY,
    agent text NOT NULL,
    started_ms bigint NOT NULL
);
