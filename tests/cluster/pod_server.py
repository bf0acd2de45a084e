"""Runs in a pod, on the standard library: HTTPS on 7447 and HTTP on 7448, with answers that show what arrived."""

import http.server
import json
import ssl
import threading
import time
from urllib.parse import parse_qs, urlsplit


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked = {key: values[0] for key, values in parse_qs(url.query).items()}
        if url.path == "/wait":
            time.sleep(float(asked["seconds"]))
        if url.path == "/bytes":
            self.answer(b"x" * int(asked["count"]))
        elif url.path == "/redirect":
            self.answer(b"", 302, {"Location": asked["to"]})
        else:
            seen = {"path": self.path, "headers": dict(self.headers), "from": self.client_address[0]}
            self.answer(json.dumps(seen).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(body if self.path == "/echo" else str(len(body)).encode(), headers={"Stoker-Mac": "kept"})

    def answer(self, body: bytes, status: int = 200, headers: dict = {}) -> None:  # noqa: B006
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 512


def main() -> None:
    secure = Server(("", 7447), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("/probe/tls.pem")
    secure.socket = context.wrap_socket(secure.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=secure.serve_forever, daemon=True).start()
    print("serving", flush=True)
    Server(("", 7448), Handler).serve_forever()


if __name__ == "__main__":
    main()
