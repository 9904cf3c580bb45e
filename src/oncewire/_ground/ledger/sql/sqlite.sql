-- The ledger on SQLite. Everything that grows is appended: no index on random keys, which would dirty a page per input.

CREATE TABLE IF NOT EXISTS ledger_meta (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

-- Each agent's chain: its end, where it begins (all before was forgotten), up to which block all effects are confirmed
-- and how far that reaches in each stream, up to which block the keys stand in runs and how many they are.
CREATE TABLE IF NOT EXISTS ledger_chains (
    chain INTEGER PRIMARY KEY,
    agent TEXT NOT NULL UNIQUE,
    number INTEGER NOT NULL,
    hash BLOB NOT NULL,
    state BLOB NOT NULL,
    base INTEGER NOT NULL,
    base_hash BLOB NOT NULL,
    base_state BLOB NOT NULL,
    confirmed INTEGER NOT NULL DEFAULT 0,
    confirmed_streams TEXT NOT NULL DEFAULT '{}',
    spilled INTEGER NOT NULL DEFAULT 0,
    spilled_keys INTEGER NOT NULL DEFAULT 0
);

-- One row per group commit: the keys of its entries (16 bytes each), its content packed, its announcement.
CREATE TABLE IF NOT EXISTS ledger_blocks (
    id INTEGER PRIMARY KEY,
    chain INTEGER NOT NULL,
    number INTEGER NOT NULL,
    entries INTEGER NOT NULL,
    effects INTEGER NOT NULL,
    keys BLOB NOT NULL,
    content BLOB NOT NULL,
    announcement BLOB NOT NULL,
    UNIQUE (chain, number)
);

-- Which effects of a block are confirmed, as ranges; the announcement counts as the last effect.
CREATE TABLE IF NOT EXISTS ledger_marks (
    chain INTEGER NOT NULL,
    block INTEGER NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    stream TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (chain, block, first)
) WITHOUT ROWID;

-- Keys of older blocks, sorted, in runs of pages: 24 bytes each (key, block, place in the block).
CREATE TABLE IF NOT EXISTS ledger_runs (
    chain INTEGER NOT NULL,
    run INTEGER NOT NULL,
    first BLOB NOT NULL,
    items BLOB NOT NULL,
    PRIMARY KEY (chain, run, first)
) WITHOUT ROWID;

-- Inputs that began or failed and are not settled: what a poison message leaves behind.
CREATE TABLE IF NOT EXISTS ledger_attempts (
    key BLOB PRIMARY KEY,
    agent TEXT NOT NULL,
    stream TEXT NOT NULL,
    consumer TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    deliveries INTEGER NOT NULL,
    started_ms INTEGER NOT NULL,
    error TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;

-- Results of calls to the outside, by input and name.
CREATE TABLE IF NOT EXISTS ledger_calls (
    key BLOB NOT NULL,
    name TEXT NOT NULL,
    result BLOB NOT NULL,
    PRIMARY KEY (key, name)
) WITHOUT ROWID;

-- Effects with a due time ahead.
CREATE TABLE IF NOT EXISTS ledger_delayed (
    id TEXT PRIMARY KEY,
    agent TEXT NOT NULL,
    due_ms INTEGER NOT NULL,
    sending BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS ledger_delayed_due ON ledger_delayed (agent, due_ms);

-- Processes that run on this ledger; a row that a dead process left behind means that it did not stop cleanly.
CREATE TABLE IF NOT EXISTS ledger_processes (
    process TEXT PRIMARY KEY,
    agent TEXT NOT NULL,
    started_ms INTEGER NOT NULL
) WITHOUT ROWID;
