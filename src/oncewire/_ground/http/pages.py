"""Static files from the package, such as pages and the JavaScript client. Read once, at the start.

Only what was found then can be asked for: a path is a key, never a place on the disk.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

from oncewire._ground.http.request import Request

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
}
SECURITY: Final = (
    b"Content-Security-Policy: default-src 'self'; connect-src 'self' ws: wss: http://127.0.0.1:*; "
    b"img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'\r\n"
    b"X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nCache-Control: no-cache\r\n"
)
"""For a page that may open WebSockets, also to a gateway elsewhere on this machine."""


class Page(NamedTuple):
    """A file as it is sent."""

    body: bytes
    content_type: str
    etag: bytes


class Pages:
    """Files by their path in the address. `index.html` answers for its folder."""

    def __init__(self, *roots: tuple[str, str], security: bytes = SECURITY) -> None:
        """Each root is a package and a folder in it; `security` are header lines that go with each file."""
        self._security = security
        self.pages: dict[bytes, Page] = {}
        for package, folder in roots:
            self._add(files(package).joinpath(folder), "/")

    def _add(self, folder: Traversable, prefix: str) -> None:
        for found in folder.iterdir():
            if found.is_dir():
                self._add(found, f"{prefix}{found.name}/")
                continue
            suffix = f".{found.name.rpartition('.')[2]}"
            if suffix in TYPES:
                body = found.read_bytes()
                page = Page(body, TYPES[suffix], b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode())
                self.pages[f"{prefix}{found.name}".encode()] = page
                if found.name == "index.html":
                    self.pages[prefix.encode()] = page

    def serve(self, request: Request, path: bytes = b"", status: int = 200) -> bool:
        """Answer, if there is such a file: that of the request's path, or the one named."""
        page = self.pages.get(path or request.path)
        if page is None or request.method not in (b"GET", b"HEAD"):
            return False
        extra = b"ETag: %b\r\n%b" % (page.etag, self._security)
        if page.etag in request.headers.get(b"if-none-match", b""):
            request.respond(304, extra=extra)
        else:
            request.respond(status, page.body, page.content_type, extra)
        return True
