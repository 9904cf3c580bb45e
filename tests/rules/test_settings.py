"""One table of settings: where a value comes from, what it may be, what is never shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground import settings
from oncewire._ground.errors import InvalidSetting
from oncewire._ground.settings import MASK, Settings, mask_url, read_file, resolve, table

EMPTY: dict[str, Any] = {}


def wrong(
    flags: dict[str, Any] = EMPTY, environ: dict[str, str] = EMPTY, file: dict[str, Any] = EMPTY
) -> InvalidSetting:
    with pytest.raises(InvalidSetting) as caught:
        resolve(flags, environ, file)
    return caught.value


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default() -> None:
    flags, environ, file = (
        {"nats_url": "nats://flag"},
        {"NATS_URL": "nats://variable"},
        {"nats": {"url": "nats://file"}},
    )
    places = [(EMPTY, EMPTY, EMPTY), (EMPTY, EMPTY, file), (EMPTY, environ, file), (flags, environ, file)]
    found = [resolve(*place) for place in places]
    assert [one.settings.nats_url for one in found] == [
        "nats://localhost:4222", "nats://file", "nats://variable", "nats://flag"
    ]  # fmt: skip
    assert [one.origins["nats_url"] for one in found] == [
        "default", "file oncewire.toml", "variable NATS_URL", "flag --nats-url"
    ]  # fmt: skip
    assert [one.is_set("nats_url") for one in found] == [False, True, True, True]


def test_every_row_has_a_unique_key_flag_and_variable_and_a_help_that_is_a_sentence() -> None:
    rows = table()
    assert len({row.key for row in rows}) == len({row.flag for row in rows}) == len(rows)
    variables = [name for row in rows for name in row.variables]
    assert len(set(variables)) == len(variables)
    assert all(row.help.endswith(".") for row in rows)


def test_every_default_passes_its_own_check() -> None:
    assert not [row.key for row in table() if row.check and row.check(row.default)]


def test_the_names_and_defaults_of_the_specifications_hold() -> None:
    found = resolve(EMPTY, EMPTY, EMPTY).settings
    assert (found.stream_prefix, found.consumer_prefix) == ("sr", "sr-consumer")
    assert (found.message_ttl_s, found.max_msgs_per_subject, found.duplicate_window_s) == (604_800, -1, 120)
    assert (found.chat_events_prefix, found.chat_tokens_prefix) == ("chat.events", "chat.tokens")
    assert (found.outbox_poll_interval_ms, found.outbox_batch_size) == (250, 25)
    assert (found.gateway_port, found.gateway_backlog_size) == (3005, 200)


def test_two_variables_of_one_setting_must_agree() -> None:
    both = {"NATS_STREAM_SUBJECT_PREFIX": "a.b", "NATS_EVENTS_PREFIX": "a.b"}
    assert resolve(EMPTY, both, EMPTY).settings.chat_events_prefix == "a.b"
    error = wrong(environ={**both, "NATS_EVENTS_PREFIX": "c"})
    assert "NATS_STREAM_SUBJECT_PREFIX and NATS_EVENTS_PREFIX differ" in error.message


def test_unknown_keys_are_errors_in_the_file_and_not_in_the_environment() -> None:
    assert resolve(EMPTY, {"NATS_ULR": "x"}, EMPTY).settings == Settings()
    assert "'nats.ulr'" in wrong(file={"nats": {"ulr": "x"}}).message
    assert "Did you mean 'nats.url'?" in wrong(file={"nats": {"ulr": "x"}}).hint
    assert "'dta'" in wrong(file={"dta": "x"}).message
    assert "must be a section" in wrong(file={"nats": 3}).message


def test_an_empty_variable_is_not_set() -> None:
    assert resolve(EMPTY, {"NATS_URL": ""}, EMPTY).origins["nats_url"] == "default"


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({"NATS_MESSAGE_TTL_SECS": "soon"}, "streams.message_ttl_s must be a whole number, not 'soon'"),
        ({"NATS_MESSAGE_TTL_SECS": "0"}, "must be from 1 to"),
        ({"ONCEWIRE_NATS_PORT": "65536"}, "embedded.nats_port must be from 0 to 65535"),
        ({"NATS_STREAM_PREFIX": "a.b"}, "streams.prefix must be"),
        ({"NATS_TOKENS_PREFIX": "a..b"}, "chat.tokens_prefix must be"),
        ({"NATS_URL": "http://h"}, "nats.url must be nats://"),
        ({"NATS_URL": "nats://h:99999"}, "port that is not a number"),
        ({"NATS_MONITOR_URL": "h:8222"}, "nats.monitor_url must be http://"),
        ({"ONCEWIRE_POSTGRES_URL": "mysql://u:hush@h"}, "postgres.url must start with postgresql://"),
        ({"NATS_TOKENS_PREFIX": "chat.events"}, "are both 'chat.events'"),
        ({"NATS_MESSAGE_TTL_SECS": "60"}, "is shorter than streams.duplicate_window_s"),
        ({"NATS_TOKEN": "hush", "NATS_USER": "me"}, "several ways to authenticate"),
        ({"NATS_CERT": "cert.pem"}, "belong together"),
        ({"ONCEWIRE_DATA": "a\0b"}, "must be a path"),
    ],
)
def test_a_bad_value_is_named_with_where_it_came_from_and_never_shows_a_secret(
    environ: dict[str, str], part: str
) -> None:
    error = wrong(environ=environ)
    assert part in error.message
    assert "hush" not in f"{error.message} {error.hint}"
    assert error.hint


@pytest.mark.parametrize("value", [True, 1.5, [], {}, "1e3", "٣"])
def test_only_whole_numbers_are_whole_numbers(value: object) -> None:
    assert "must be a whole number" in wrong(file={"outbox": {"batch_size": value}}).message


def test_secrets_are_masked_wherever_they_stand() -> None:
    environ = {
        "NATS_URL": "nats://me:hush1@a:4222,nats://hush2@b:4222",
        "ONCEWIRE_POSTGRES_URL": "postgresql://me:hush3@h/x?password=hush4&sslmode=require",
        "NATS_PASSWORD": "hush5",
        "NATS_USER": "me",
    }
    resolved = resolve(EMPTY, environ, EMPTY)
    shown = "\n".join(resolved.shown(row) for row in table())
    assert "hush" not in shown
    assert f"nats://me:{MASK}@a:4222,nats://{MASK}@b:4222" in shown
    assert f"postgresql://me:{MASK}@h/x?password={MASK}&sslmode=require" in shown


def test_a_user_name_alone_is_a_token_for_nats_and_no_secret_for_postgres() -> None:
    assert mask_url("nats://token@h") == f"nats://{MASK}@h"
    assert mask_url("postgresql://me@h/x?passfile=/p") == "postgresql://me@h/x?passfile=/p"


def test_replaced_values_name_their_origin() -> None:
    resolved = resolve(EMPTY, EMPTY, EMPTY).with_values({"nats_url": "nats://h:1"}, "up in d")
    assert (resolved.settings.nats_url, resolved.origins["nats_url"]) == ("nats://h:1", "up in d")


def test_settings_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().nats_url = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"[nats", "is not valid TOML"),
        (b"\xff\xfe", "is not UTF-8: bad byte at position 0"),
        (b"a = 1\na = 2", "is not valid TOML"),
        (b"#" * (settings.CONFIG_BYTES_MAX + 1), "is larger than"),
        (b"a = " + b"[" * 100_000, "is not valid TOML"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "oncewire.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidSetting, match=part) as caught:
        read_file(path)
    assert str(path) in caught.value.message


def test_a_file_that_is_named_must_be_there_and_one_that_is_not_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(settings.CONFIG_VARIABLE, raising=False)
    assert settings.load().origins["data"] == "default"
    with pytest.raises(InvalidSetting, match="cannot be read"):
        settings.load(config=tmp_path / "missing.toml")
    monkeypatch.setenv(settings.CONFIG_VARIABLE, str(tmp_path / "other.toml"))
    (tmp_path / "other.toml").write_text('data = "x"')
    assert settings.load().settings.data == Path("x")
