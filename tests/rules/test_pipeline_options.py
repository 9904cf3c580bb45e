"""The options of source and sink: every mistake is an error that names the option, and no secret is shown."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from oncewire._ground.errors import InvalidSetting
from oncewire.pipeline.options import ALL, read_options, write_options

CREDS = (
    "-----BEGIN NATS USER JWT-----\neyJ0.abc.def\n------END NATS USER JWT------\n"
    "-----BEGIN USER NKEY SEED-----\nSUABCDEF\n------END USER NKEY SEED------\n"
)


def no_file(path: str) -> str:
    raise FileNotFoundError(path)


def batch(**given: str) -> Any:
    return read_options({"stream": "S", **given}, no_file, is_streaming=False)


def streaming(**given: str) -> Any:
    return read_options({"stream": "S", **given}, no_file, is_streaming=True)


def test_spark_may_hand_names_over_in_small_letters() -> None:
    read = batch(startingoffsets="17", INCLUDEHEADERS="True", minpartitions="3")
    assert (17, True, 3) == (read.start, read.includes_headers, read.partitions_min)


def test_places_are_words_sequences_or_times() -> None:
    assert "earliest" == batch().start
    assert "latest" == streaming().start
    assert datetime(2026, 1, 2, tzinfo=UTC) == batch(startingOffsets="2026-01-02T00:00:00Z").start


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"strem": "x"}, "there is no option strem"),
        ({"maxRecordsPerTrigger": "5"}, "maxRecordsPerTrigger means nothing in a batch read"),
        ({"writeId": "x"}, "writeId means nothing in a batch read"),
        ({"path": "x"}, "path"),
        ({"stream": "a.b"}, "stream"),
        ({"subjects": "a..b"}, "subjects"),
        ({"subjects": "a.>.b"}, "subjects"),
        ({"startingOffsets": "0"}, "startingOffsets"),
        ({"startingOffsets": "yesterday"}, "startingOffsets"),
        ({"startingOffsets": "2026-01-01T00:00:00"}, "without a zone"),
        ({"startingOffsets": "9", "endingOffsets": "5"}, "startingOffsets and endingOffsets"),
        ({"endingOffsets": "earliest"}, "endingOffsets"),
        ({"minPartitions": "0"}, "minPartitions"),
        ({"minPartitions": "many"}, "minPartitions"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss"),
        ({"includeHeaders": "1"}, "includeHeaders"),
        ({"url": "http://x"}, "url"),
        ({"url": " , "}, "url"),
        ({"url": "nats://host:99999"}, "url"),
        ({"user": "u"}, "user needs password"),
        ({"password": "p"}, "password needs user"),
        ({"token": "t", "user": "u", "password": "p"}, "token and user contradict"),
        ({"credentials": CREDS, "nkey": "SUX"}, "credentials and nkey contradict"),
        ({"credentials": "nonsense"}, "credentials"),
        ({"credentialsFile": "/no/such"}, "credentialsFile"),
        ({"nkey": "nonsense"}, "nkey"),
        ({"tlsKey": "k"}, "tlsKey needs tlsCert"),
        ({"tls": "false", "tlsCa": "ca.pem"}, "tls is false"),
        ({"inboxPrefix": "_INBOX.>"}, "inboxPrefix"),
        ({"inboxPrefix": ""}, "inboxPrefix"),
    ],
)
def test_a_mistake_is_an_error_that_names_the_option(given: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidSetting, match=named):
        batch(**given)


def test_the_stream_must_be_named() -> None:
    with pytest.raises(InvalidSetting, match="stream is missing"):
        read_options({}, no_file, is_streaming=False)


def test_an_end_means_nothing_in_a_stream() -> None:
    with pytest.raises(InvalidSetting, match="endingOffsets means nothing in a streaming read"):
        streaming(endingOffsets="5")


def test_limits_per_trigger_name_the_spark_that_they_need() -> None:
    given = {"stream": "S", "maxRecordsPerTrigger": "5"}
    assert 5 == read_options(given, no_file, is_streaming=True).records_per_trigger_max
    with pytest.raises(InvalidSetting, match=r"maxRecordsPerTrigger needs Spark 4\.2"):
        read_options(given, no_file, is_streaming=True, has_admission=False)


def test_credentials_come_inline_or_from_a_file() -> None:
    inline = read_options({"stream": "S", "credentials": CREDS}, no_file, is_streaming=False)
    filed = read_options({"stream": "S", "credentialsFile": "x"}, lambda _: CREDS, is_streaming=False)
    assert ("eyJ0.abc.def", "SUABCDEF") == inline.access.creds == filed.access.creds
    seed = read_options({"stream": "S", "nkeyFile": "x"}, lambda _: "# mine\nSUSEED\n", is_streaming=False)
    assert "SUSEED" == seed.access.nkey


@pytest.mark.parametrize(
    "given",
    [
        {"url": "nats://me:hunter2@host"},
        {"user": "me", "password": "hunter2"},
        {"token": "hunter2"},
        {"nkey": "Shunter2"},
        {"credentials": CREDS.replace("SUABCDEF", "hunter2")},
    ],
)
def test_no_text_of_the_options_shows_a_secret(given: dict[str, str]) -> None:
    read = batch(**given)
    assert "hunter2" not in repr(read) + str(read)


def test_an_error_about_an_address_does_not_show_its_password() -> None:
    with pytest.raises(InvalidSetting) as caught:
        batch(url="http://me:hunter2@host")
    assert "hunter2" not in str(caught.value)


def test_a_write_has_its_own_options() -> None:
    write = write_options({"url": "nats://h", "writeId": "job-7", "stream": "S"}, no_file, is_streaming=False)
    assert ("job-7", "S") == (write.write_id, write.stream)
    for given, named in (({"subjects": "a"}, "subjects"), ({"writeId": ""}, "writeId"), ({"nope": "1"}, "nope")):
        with pytest.raises(InvalidSetting, match=named):
            write_options(given, no_file, is_streaming=False)
    with pytest.raises(InvalidSetting, match="writeId contradicts writeStream"):
        write_options({"writeId": "x"}, no_file, is_streaming=True)


def test_what_spark_leaves_among_the_options_is_passed_over() -> None:
    write_options({"checkpointLocation": "/x", "queryName": "q"}, no_file, is_streaming=True)


def test_every_option_stands_in_the_documented_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    assert [] == [name for name in ALL if f"`{name}`" not in text]


def test_planning_loads_neither_numpy_nor_arrow_nor_the_client() -> None:
    """Spark starts a process for each step of planning: what it imports, every micro-batch pays for."""
    heavy = "('numpy', 'pyarrow', 'asyncio', 'cryptography')"
    code = (
        f"import pyspark.sql, sys; [sys.modules.pop(name, 0) for name in {heavy}];"
        f"import pyspark_oncewire; print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]" == done.stdout.strip()


def test_the_spark_extra_brings_no_spark() -> None:
    """A cluster has its own."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["optional-dependencies"]["spark"] if name.startswith("pyspark")]
