"""What agents say to each other, as bytes: JSON messages in frames that nobody else can make.

Both ends open with a fresh nonce; each frame carries an HMAC-SHA256 over its direction, its number
and its body, under a key made from the job's secret and both nonces. So a frame that was recorded
is refused in another connection, a second time in its own, and towards its own sender. Secret are
the keys only: messages can be read on the network. Sans I/O; what is wrong raises WireError and
ends the connection, never the process.
"""

from __future__ import annotations

import hmac
import json
import os
import struct
from typing import Any

from ftslurm.errors import FtslurmError

Message = dict[str, Any]

MAGIC = b"ftslurm1"
NONCE_BYTES = 16
_GREETING_BYTES = len(MAGIC) + NONCE_BYTES
_HEAD = struct.Struct(">I32s")
MAX_BYTES = 32 << 20
"""Of one body: a report on 10,000 ranks has 2 MiB."""
MAX_FIRST_BYTES = 64 << 10
"""Until a peer has shown that it has the key, no more than this is kept for it."""


class WireError(FtslurmError):
    """A connection whose bytes are not an agent's of this job."""


class Channel:
    """One end of a connection."""

    def __init__(self, key: bytes, *, is_server: bool) -> None:
        self._key = key
        self._is_server = is_server
        self._nonce = os.urandom(NONCE_BYTES)
        self._received = bytearray()
        self._in_key = b""
        self._out_key = b""
        self._in_count = 0
        self._out_count = 0

    @property
    def greeting(self) -> bytes:
        """The first bytes to send."""
        return MAGIC + self._nonce

    @property
    def is_open(self) -> bool:
        """The other end's nonce is known: messages can be sealed."""
        return bool(self._in_key)

    @property
    def is_trusted(self) -> bool:
        """The other end has shown that it has the key."""
        return self._in_count > 0

    def seal(self, message: Message) -> bytes:
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_BYTES:
            raise WireError(f"a message has {len(body)} bytes, {MAX_BYTES} are the limit")
        frame = _HEAD.pack(len(body), _mac(self._out_key, self._out_count, body)) + body
        self._out_count += 1
        return frame

    def feed(self, data: bytes) -> list[Message]:
        """Whole messages that have come with `data`."""
        self._received += data
        if not self.is_open:
            if len(self._received) < _GREETING_BYTES:
                return []
            self._greeted(bytes(self._received[:_GREETING_BYTES]))
            del self._received[:_GREETING_BYTES]
        messages = []
        while len(self._received) >= _HEAD.size:
            size, mac = _HEAD.unpack_from(self._received)
            limit = MAX_BYTES if self.is_trusted else MAX_FIRST_BYTES
            if size > limit:
                raise WireError(f"a frame of {size} bytes, {limit} are the limit")
            if len(self._received) < _HEAD.size + size:
                break
            body = bytes(self._received[_HEAD.size : _HEAD.size + size])
            del self._received[: _HEAD.size + size]
            messages.append(self._opened(body, mac))
        return messages

    def _greeted(self, greeting: bytes) -> None:
        if not greeting.startswith(MAGIC):
            raise WireError("the other end is not an agent of this version")
        theirs = greeting[len(MAGIC) :]
        nonces = theirs + self._nonce if self._is_server else self._nonce + theirs
        to_server = hmac.digest(self._key, b"to server" + nonces, "sha256")
        to_client = hmac.digest(self._key, b"to client" + nonces, "sha256")
        ways = (to_server, to_client) if self._is_server else (to_client, to_server)
        self._in_key, self._out_key = ways

    def _opened(self, body: bytes, mac: bytes) -> Message:
        if not hmac.compare_digest(mac, _mac(self._in_key, self._in_count, body)):
            raise WireError("a frame that was not made with this job's key, or not just now")
        self._in_count += 1
        try:
            message = json.loads(body)
        except ValueError:
            raise WireError("a frame that is not JSON") from None
        if not isinstance(message, dict):
            raise WireError("a frame that is not a JSON object")
        return message


def _mac(key: bytes, count: int, body: bytes) -> bytes:
    return hmac.digest(key, struct.pack(">Q", count) + body, "sha256")
