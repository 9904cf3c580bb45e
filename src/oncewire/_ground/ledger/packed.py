"""The bytes of a block's content, as they stand in a store. Pure.

    one input or a few      MessagePack of `Content`: an array of four, so its first byte is 0x94
    more                    the same inside a Zstandard frame with a checksum: its first byte is 0x28

An encoder goes by what a value is, a decoder by what its field says. So that nothing is committed that could never be
read again, what comes from outside is checked before it is packed: a column at a time, a hundredth of the work of
unpacking.

Messages of a kind say mostly the same, and a block holds their bodies and those of their effects. Compressed at the
quickest level that still finds that, it is written in less time than it would be as it is (docs/decisions/blocks.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from oncewire._ground.errors import ContractViolation
from oncewire._ground.fields import columns, distinct
from oncewire._ground.ledger.rules import Content, Entry, Sending

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESSED_FROM: Final = 8 * 1024
"""Less than that takes as many pages either way."""
_FRAME: Final = b"\x28\xb5\x2f\xfd"
_OPTIONS: Final[dict[int, int]] = {
    zstd.CompressionParameter.compression_level: -3,
    zstd.CompressionParameter.checksum_flag: 1,
}

_packer = msgspec.msgpack.Encoder()
_unpack = msgspec.msgpack.Decoder(Content).decode
_unpack_sending = msgspec.msgpack.Decoder(Sending).decode


def pack(content: Content, room: bytearray) -> bytes:
    """By way of `room`, whatever stood there: to make room for a megabyte anew costs twice as much again."""
    _check_text(columns(content.entries, Entry, "identity", "subject", "error"))
    _check_sendings(content.effects)
    try:
        _packer.encode_into(content, room)
    except (TypeError, ValueError, OverflowError) as error:
        raise _unpackable(error) from error
    return zstd.compress(room, options=_OPTIONS) if len(room) >= COMPRESSED_FROM else bytes(room)


def pack_sending(sending: Sending) -> bytes:
    """One that waits for its time."""
    _check_sendings([sending])
    try:
        return _packer.encode(sending)
    except (TypeError, ValueError, OverflowError) as error:
        raise _unpackable(error) from error


def _check_sendings(sendings: Sequence[Sending]) -> None:
    payloads, headers, *text = columns(sendings, Sending, "payload", "headers", "id", "subject", "stream", "trace")
    _check_text(text)
    if not set(map(type, payloads)) <= {bytes}:
        raise _unpackable("a body is not bytes")
    for one in distinct(headers):
        if one is not None:
            if type(one) is not dict:
                raise _unpackable("headers are not a dict")
            _check_text([[*one, *one.values()]])


def _check_text(text_columns: Iterable[list[str]]) -> None:
    try:
        for column in text_columns:
            "".join(column)
    except TypeError as error:
        raise _unpackable(error) from error


def _unpackable(what: object) -> ContractViolation:
    return ContractViolation(f"the ledger cannot hold this: {what}")


def unpack(data: bytes) -> Content:
    """Of either kind; bytes that are none break the contract."""
    try:
        return _unpack(zstd.decompress(data) if data.startswith(_FRAME) else data)
    except (msgspec.MsgspecError, zstd.ZstdError) as error:
        raise ContractViolation(str(error)) from error


def unpack_sending(data: bytes) -> Sending:
    try:
        return _unpack_sending(data)
    except msgspec.MsgspecError as error:
        raise ContractViolation(str(error)) from error
