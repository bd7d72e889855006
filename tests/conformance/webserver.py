"""A web server for inside: what a preview has to carry, with the standard library alone. Its argument is the port."""

import base64
import hashlib
import json
import struct
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GO = threading.Event()
CHUNK = 256 * 1024
PAGE = b"""<!doctype html><title>inside</title><script src="script.js"></script>"""
SCRIPT = b"""
const socket = new WebSocket(location.href.replace("http", "ws").replace("page", "ws"));
socket.onopen = () => socket.send("from the page");
socket.onmessage = (event) => fetch("done?" + new URLSearchParams({
  said: event.data, address: location.href, cookies: document.cookie }));
"""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def answer(self, body, kind="text/plain", status=200, headers=()):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if path == "/seen":
            seen = {"target": self.path, "headers": self.headers.items(), "connection": self.client_address[1]}
            self.answer(json.dumps(seen).encode(), "application/json")
        elif path == "/events":
            self.events()
        elif path == "/go":
            GO.set()
            self.answer(b"gone")
        elif path == "/ws":
            self.websocket()
        elif path == "/page":
            self.answer(PAGE, "text/html")
        elif path == "/script.js":
            self.answer(SCRIPT, "text/javascript")
        elif path == "/done":
            print("done", query, flush=True)
            self.answer(b"thanks")
        elif path == "/hangup":
            self.answer(b"bye")
            self.close_connection = True  # without having said so
        elif path == "/moved":
            cookies = [("Set-Cookie", "session=1; Path=/; Domain=localhost"), ("Set-Cookie", "plain=2")]
            self.answer(b"", status=302, headers=[("Location", "/seen"), *cookies])
        elif path == "/large":
            self.send_response(200)
            self.send_header("Content-Length", query)
            self.end_headers()
            for _ in range(int(query) // CHUNK):
                self.wfile.write(bytes(CHUNK))
        else:
            self.answer(b"not this one", status=404)

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        if self.path == "/both":
            self.both()
        else:
            size, check = 0, 0
            for piece in self.body():
                size += len(piece)
                if self.path == "/upload?check":
                    check = zlib.crc32(piece, check)
            self.answer(json.dumps({"size": size, "check": check}).encode())

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers["Content-Length"])
        while left:
            piece = self.rfile.read1(min(left, CHUNK))
            left -= len(piece)
            yield piece

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def streaming(self, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def both(self):
        """Says everything in capitals as it comes."""
        self.streaming("text/plain")
        for piece in self.body():
            self.chunk(piece.upper())
        self.chunk(b"")

    def events(self):
        """One event at once, and another when somebody has asked for /go. Then it waits for its client to leave."""
        self.streaming("text/event-stream")
        GO.clear()
        self.chunk(b"data: first\n\n")
        GO.wait(30)
        self.chunk(b"data: second\n\n")
        self.rfile.read(1)
        print("the reader of events left", flush=True)
        self.close_connection = True

    def websocket(self):
        """Says everything back that comes in frames of up to 64 KiB."""
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        while head := self.rfile.read(2):
            size = head[1] & 127
            if size == 126:
                size = struct.unpack(">H", self.rfile.read(2))[0]
            mask, data = self.rfile.read(4), self.rfile.read(size)
            data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
            extended = struct.pack(">BH", 126, size) if size > 125 else bytes([size])
            self.wfile.write(head[:1] + extended + data)
            if head[0] & 15 == 8:
                break
        print("the websocket is closed", flush=True)
        self.close_connection = True


class Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True


server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
print("listening", flush=True)
server.serve_forever()
