"""Serve S3 with moto on a port of 127.0.0.1 that is printed.

Objects are kept in memory, and signatures are not checked.
"""

import io
import threading

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.test import run_wsgi_app

application = DomainDispatcherApplication(create_backend_app)
one_at_a_time = threading.Lock()  # moto looks first whether a condition holds, and then writes


class Handler(WSGIRequestHandler):
    """A connection with any number of requests; werkzeug's own handler closes it after the first."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def run_wsgi(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        environ = self.make_environ() | {"wsgi.input": io.BytesIO(body)}
        with one_at_a_time:
            parts, status, headers = run_wsgi_app(application, environ, buffered=True)
            data = b"".join(parts)
        code, _, reason = status.partition(" ")
        self.send_response(int(code), reason)
        head_only = self.command == "HEAD"
        for name, value in headers.items():
            if head_only or name.lower() != "content-length":
                self.send_header(name, value)
        if not head_only:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_request(self, *_: object) -> None:
        """Say nothing."""


server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
print(server.port, flush=True)
server.serve_forever()
