"""A web app in which every visitor has a story of their own: a session of `txl serve` for each, which remembers what was written so far.

    txl serve runs/novel &
    python examples/web_session.py                     http://127.0.0.1:8080

The model reads each sentence once. A session keeps its memory, so the hundredth request costs as much as the first.
"""

import argparse
import json
import secrets
from html import escape
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs
from urllib.request import Request, urlopen

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--server", default="http://127.0.0.1:8000", help="where txl serve listens")
parser.add_argument("--port", type=int, default=8080)
parser.add_argument("--tokens", type=int, default=60, help="that the model adds to a visitor's words (60)")
arguments = parser.parse_args()

PAGE = """<!doctype html><meta charset="utf-8"><title>A story</title><style>body{{max-width:40rem;margin:2rem auto;font:1.1rem serif}}</style>
<p style="white-space:pre-wrap">{story}</p><form method="post"><input name="text" size="50" autofocus maxlength="500"><button>Go on</button></form>"""
LONGEST_BODY, MOST_VISITORS = 4096, 16
stories: dict[str, str] = {}
sessions: dict[str, str] = {}


def ask(path: str, **body: object) -> dict:
    request = Request(f"{arguments.server}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)


def tell_on(visitor: str, text: str) -> None:
    if visitor not in sessions:
        if len(sessions) >= MOST_VISITORS:  # the one who came first leaves
            gone = next(iter(sessions))
            urlopen(Request(f"{arguments.server}/v1/sessions/{sessions.pop(gone)}", method="DELETE")).close()
            stories.pop(gone, None)
        with urlopen(f"{arguments.server}/v1/models", timeout=60) as answer:
            model = json.load(answer)["data"][0]["id"]
        sessions[visitor] = ask("/v1/sessions", model=model)["id"]
    session = f"/v1/sessions/{sessions[visitor]}"
    ask(f"{session}/feed", text=text)
    written = ask(f"{session}/generate", max_tokens=arguments.tokens, temperature=0.8)["choices"][0]["text"]
    stories[visitor] = stories.get(visitor, "") + text + written


class Handler(BaseHTTPRequestHandler):
    def visitor(self) -> str:
        cookie = SimpleCookie(self.headers.get("Cookie", ""))
        return cookie["visitor"].value if "visitor" in cookie else secrets.token_hex(16)

    def do_GET(self) -> None:
        visitor = self.visitor()
        page = PAGE.format(story=escape(stories.get(visitor, "Begin: ")))
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Set-Cookie", f"visitor={visitor}; HttpOnly; SameSite=Strict")
        self.end_headers()
        self.wfile.write(page.encode())

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if not 0 < length <= LONGEST_BODY:
            return self.send_error(413)
        text = parse_qs(self.rfile.read(length).decode(errors="replace")).get("text", [""])[0]
        if text:
            tell_on(self.visitor(), text + " ")
        return self.do_GET()


with ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler) as server:
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
