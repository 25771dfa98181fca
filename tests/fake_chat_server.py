"""An OpenAI-compatible chat server in this process, whose answers a test decides."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def completion(content=None, *, reasoning=None, calls=(), reason="stop") -> dict:
    """A chat completion; `calls` are (name, arguments as JSON text)."""
    entries = [{"id": "x", "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    message = {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": entries}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": reason}]}


@contextmanager
def chat_server(answer, *, models=("miniature",)):
    """Yields (url, requests so far). `answer(body)` gives an object, raw bytes, or (HTTP status, object or bytes)."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._send(200, {"data": [{"id": name} for name in models]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, body))
            found = answer(body)
            self._send(*(found if isinstance(found, tuple) else (200, found)))

        def _send(self, status, content):
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # a connection that finds five waiting is tried again a second later

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
