"""What a CONNECT says about who we are: user and password, token, nkey, or a creds file (JWT with nkey)."""

from __future__ import annotations

from oncewire._ground.jetstream.nkeys import read_creds, read_nkey
from oncewire._ground.jetstream.options import Options


def credentials(options: Options, server: str, nonce: str) -> dict[str, str]:
    """The fields of CONNECT that authenticate. What an address itself carries wins for that server."""
    user, password, token = options.credentials_of(server)
    if token:
        return {"auth_token": token}
    if user:
        return {"user": user, "pass": password}
    if options.creds:
        jwt, key = read_creds(options.creds)
        return {"jwt": jwt, "sig": key.sign(nonce)} if nonce else {"jwt": jwt}
    if options.nkey:
        key = read_nkey(options.nkey)
        return {"nkey": key.public, "sig": key.sign(nonce)}
    return {}
