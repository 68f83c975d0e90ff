"""An OpenAI-compatible server that fails on purpose."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Rude(ThreadingHTTPServer):
    """`faults[question]`: what goes wrong, try by try, before the question is answered."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults, self.replies, self.models = {}, {}, ["m"]
        self.asked, self.bodies, self.keys, self.tries = Counter(), [], [], Counter()
        self.lock = threading.Lock()
        self.busy = self.busiest = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request, address):
        """A client that gives up is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def say(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        assert self.path == "/v1/models"
        self.say(200, json.dumps({"data": [{"id": name} for name in self.server.models]}).encode())

    def do_POST(self):
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.asked[question] += 1
            self.server.bodies.append(body)
            self.server.keys.append(self.headers["Authorization"])
            faults = self.server.faults.get(question, [])
            fault = faults[self.server.tries[question]] if self.server.tries[question] < len(faults) else None
            self.server.tries[question] += 1
            self.server.busy += 1
            self.server.busiest = max(self.server.busiest, self.server.busy)
        try:
            self.answer(question, fault)
        finally:
            with self.server.lock:
                self.server.busy -= 1

    def answer(self, question, fault):
        if isinstance(fault, int):
            self.say(fault, b'{"error": "no"}', **({"Retry_After": "0"} if fault == 429 else {}))
        elif fault == "drop":
            self.hang_up()
        elif fault == "torn":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.wfile.flush()
            self.hang_up()
        elif isinstance(fault, bytes):
            self.say(200, fault)
        elif fault == "silence":
            time.sleep(1.5)
            self.say(200, b"{}")
        else:
            time.sleep(fault or 0)  # a float: the answers come out of order
            self.say(200, json.dumps({"choices": [self.choice(question)]}).encode())

    def hang_up(self):
        self.connection.shutdown(socket.SHUT_RDWR)  # closing alone would wait for the handler's own files
        self.close_connection = True

    def choice(self, question):
        reply = self.server.replies.get(question, f"answer to {question}")
        return reply if isinstance(reply, dict) else {"message": {"content": reply}, "finish_reason": "stop"}


@contextmanager
def rude_server() -> Iterator[Rude]:
    server = Rude()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
