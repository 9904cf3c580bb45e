"""The bytes of a block's content, as they stand in a store. Pure.

    one input or a few      MessagePack of `Content`: an array of four, so its first byte is 0x94
    more                    the same inside a Zstandard frame with a checksum: its first byte is 0x28

Messages of a kind say mostly the same, and a block holds their bodies and those of their effects. Compressed at the
quickest level that still finds that, it is written in less time than it would be as it is (docs/decisions/blocks.md).
"""

from __future__ import annotations

import sys
from typing import Final

import msgspec

from oncewire._ground.errors import ContractViolation
from oncewire._ground.ledger.rules import Content

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


def pack(content: Content, room: bytearray) -> bytes:
    """By way of `room`, whatever stood there: to make room for a megabyte anew costs twice as much again."""
    _packer.encode_into(content, room)
    return zstd.compress(room, options=_OPTIONS) if len(room) >= COMPRESSED_FROM else bytes(room)


def unpack(data: bytes) -> Content:
    """Of either kind; bytes that are none break the contract."""
    try:
        return _unpack(zstd.decompress(data) if data.startswith(_FRAME) else data)
    except (msgspec.MsgspecError, zstd.ZstdError) as error:
        raise ContractViolation(str(error)) from error
