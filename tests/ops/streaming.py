"""A server on this machine whose streams end as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "the engine is lost"}}\n\n'
CUT = b""
"""The connection ends inside of an event."""


@contextmanager
def streaming(ending: bytes) -> Iterator[str]:
    """Its URL. Whatever is asked, the answer is one token and then `ending`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._write_chunk(TOKEN)
            if ending == CUT:
                self.wfile.write(b"%x\r\n%s" % (len(TOKEN), TOKEN[:9]))
            else:
                self._write_chunk(ending)
                self._write_chunk(b"")  # the last one
            self.close_connection = True

        def _write_chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
