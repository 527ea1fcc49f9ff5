"""What the client does at run time, against a server that answers as it is told."""

from __future__ import annotations

import base64
import json
import sys
import threading
import unittest
import unittest.mock
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpuaas

Answer = tuple[int, dict[str, str], Any]


class Hub(ThreadingHTTPServer):
    """Gives the answers in their order and keeps the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Answer | None] = []
        self.seen: list[tuple[str, str, dict[str, str], Any]] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Hub

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.server.seen.append((self.command, self.path, dict(self.headers), json.loads(body) if body else None))
        given = self.server.answers.pop(0)
        if given is None:  # a lost connection
            self.close_connection = True
            return
        status, headers, value = given
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def problem(status: int, **headers: str) -> Answer:
    return status, {name.replace("_", "-"): text for name, text in headers.items()}, {
        "type": "about:blank", "title": "t", "status": status, "code": "some_code", "detail": "No.",
        "correlation_id": "c-1", "errors": [{"pointer": "/name", "reason": "is missing"}],
    }


ORG = {"id": "o-1", "slug": "acme", "display_name": "Acme", "created_at": "2026-01-31T12:00:00Z"}


def event(pos: int, subject: str = "u") -> bytes:
    return b"id: x\ndata: " + json.dumps({
        "id": "e", "source": "s", "specversion": "1.0", "type": "t", "subject": subject, "pos": pos,
        "time": "2026-01-31T12:00:00Z", "datacontenttype": "application/json", "resourceversion": 1,
        "data": {"event_id": "e", "correlation_id": "c"},
    }, ensure_ascii=False).encode() + b"\n\n"


class ClientTest(unittest.TestCase):
    """Each test has a server of its own."""

    def setUp(self) -> None:
        self.server = Hub()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        self.slept: list[float] = []
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.hub = self.client("token")

    def client(self, credential: Any) -> gpuaas.Client:
        return gpuaas.Client(self.url, credential=credential, sleep=self.slept.append)

    def test_a_busy_hub_is_asked_again_with_the_same_key_after_what_it_says(self) -> None:
        self.server.answers = [problem(429, Retry_After="7"), problem(503, Retry_After="900"), None, (201, {}, ORG)]
        org = self.hub.create_org(gpuaas.OrgCreate(slug="acme", display_name="Acme"))
        self.assertEqual("acme", org.slug)
        self.assertEqual(2026, org.created_at.year)
        self.assertEqual([7.0, 60.0], self.slept[:2])
        self.assertEqual(1, len({headers["X-Idempotency-Key"] for _, _, headers, _ in self.server.seen}))
        self.assertEqual({"slug": "acme", "display_name": "Acme"}, self.server.seen[0][3])

    def test_a_refusal_is_an_exception_and_not_repeated(self) -> None:
        self.server.answers = [problem(422)]
        with self.assertRaises(gpuaas.ProblemError) as refused:
            self.hub.create_org(gpuaas.OrgCreate(slug="acme", display_name="Acme"), idempotency_key="mine")
        self.assertEqual(("some_code", "c-1"), (refused.exception.problem.code, refused.exception.problem.correlation_id))
        self.assertIn("/name: is missing", str(refused.exception))
        self.assertEqual("mine", self.server.seen[0][2]["X-Idempotency-Key"])

    def test_a_hub_that_stays_away_is_unreachable(self) -> None:
        self.server.answers = [None] * 6
        with self.assertRaises(gpuaas.UnreachableError):
            self.hub.get_allocation("p-1", "a-1")
        self.assertEqual(5, len(self.slept))

    def test_a_list_goes_through_all_pages(self) -> None:
        self.server.answers = [(200, {}, {"items": [ORG], "next_cursor": "c2"}), (200, {}, {"items": [ORG]})]
        self.assertEqual(["o-1", "o-1"], [org.id for org in self.hub.list_orgs()])
        self.assertEqual("/api/v1/orgs?cursor=c2&limit=200", self.server.seen[1][1])

    def test_a_parameter_that_is_a_list_is_sent_for_each_item(self) -> None:
        self.server.answers = [(200, {}, {"items": []})]
        self.hub.list_targets("p-1", "demo", "1", requirement=["numpy>=1,<2"], volume_id=["v-1", "v-2"])
        _, query = self.server.seen[0][1].split("?")
        self.assertEqual("requirement=numpy%3E%3D1%2C%3C2&volume_id=v-1&volume_id=v-2", query)

    def test_a_redirect_is_not_followed(self) -> None:
        elsewhere = Hub()
        self.addCleanup(elsewhere.server_close)
        self.addCleanup(elsewhere.shutdown)
        for status in (301, 302, 303, 307, 308):
            location = f"http://localhost:{elsewhere.server_address[1]}/api/v1/orgs"
            self.server.answers = [(status, {"Location": location}, {})]
            with self.assertRaises(gpuaas.ProblemError) as refused:
                self.hub.get_allocation("p-1", "a-1")
            self.assertEqual(status, refused.exception.problem.status)
        self.assertEqual([], elsewhere.seen)

    def test_a_plain_request_to_this_machine_goes_through_no_proxy(self) -> None:
        proxy = Hub()
        self.addCleanup(proxy.server_close)
        self.addCleanup(proxy.shutdown)
        proxy.answers = [(200, {}, ORG)]
        self.server.answers = [(200, {}, ORG)]
        address = f"http://127.0.0.1:{proxy.server_address[1]}"
        with unittest.mock.patch.dict("os.environ", {"http_proxy": address, "no_proxy": ""}):
            self.client("token").create_org(gpuaas.OrgCreate(slug="acme", display_name="Acme"))
        self.assertEqual(([], 1), (proxy.seen, len(self.server.seen)))

    def test_a_recording_client_has_the_headers_of_its_last_answer(self) -> None:
        hub = self.hub.recording()
        self.server.answers = [
            (201, {"ETag": '"1"', "X-Request-ID": "r-1", "Idempotency-Replayed": "true"}, ORG),
            (200, {"ETag": '"2"'}, ORG),
            (412, {"ETag": '"3"', "X-Request-ID": "r-3"}, problem(412)[2]),
        ]
        hub.create_org(gpuaas.OrgCreate(slug="acme", display_name="Acme"))
        names = ("etag", "X-Request-ID", "Idempotency-Replayed")
        self.assertEqual(['"1"', "r-1", "true"], [hub.headers[name] for name in names])
        hub.create_org(gpuaas.OrgCreate(slug="acme", display_name="Acme"))
        self.assertEqual('"2"', hub.headers["ETag"])
        self.assertIsNone(hub.headers["X-Request-ID"])
        with self.assertRaises(gpuaas.ProblemError) as refused:
            hub.create_org(gpuaas.OrgCreate(slug="acme", display_name="Acme"))
        self.assertEqual("r-3", refused.exception.headers["X-Request-ID"])
        self.assertEqual('"3"', hub.headers["ETag"])
        with self.assertRaises(ValueError):
            self.hub.headers

    def test_a_service_account_proves_its_key_by_an_assertion_and_keeps_it(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        key = Ed25519PrivateKey.generate()
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        token = {"access_token": "t", "token_type": "Bearer", "expires_in": 900, "expires_at": "2026-01-31T12:00:00Z"}
        page: Answer = (200, {}, {"items": [ORG]})
        # Of the second mint the answer is lost, and the hub takes the same assertion for used.
        self.server.answers = [
            (200, {}, token), page, problem(401), None, problem(401), (200, {}, token), page,
        ]
        hub = self.client(gpuaas.ServiceAccountCredential("sa", "key", pem))
        list(hub.list_orgs())
        list(hub.list_orgs())
        used = set()
        self.assertEqual(self.server.seen[3][3], self.server.seen[4][3])
        for _, _, _, body in (self.server.seen[0], self.server.seen[3], self.server.seen[5]):
            self.assertEqual({"grant_type", "assertion"}, set(body))
            self.assertEqual("urn:ietf:params:oauth:grant-type:jwt-bearer", body["grant_type"])
            parts = body["assertion"].split(".")
            header, claims, signature = (base64.urlsafe_b64decode(part + "==") for part in parts)
            key.public_key().verify(signature, body["assertion"].rsplit(".", 1)[0].encode())
            self.assertEqual({"alg": "EdDSA", "kid": "key", "typ": "JWT"}, json.loads(header))
            said = json.loads(claims)
            self.assertEqual(("sa", "sa", "gpuaas"), (said["iss"], said["sub"], said["aud"]))
            self.assertEqual(60, said["exp"] - said["iat"])
            used.add(said["jti"])
        self.assertEqual(3, len(used))

    def test_a_text_that_is_no_key_of_ed25519_is_refused(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        other = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        for text in ("pem", other):
            with self.assertRaises(ValueError):
                gpuaas.ServiceAccountCredential("sa", "key", text)

    def test_a_service_account_mints_one_token_and_another_where_it_is_refused(self) -> None:
        def token(text: str) -> Answer:
            return 200, {}, {
                "access_token": text, "token_type": "Bearer", "expires_in": 900, "expires_at": "2026-01-31T12:00:00Z",
            }

        page: Answer = (200, {}, {"items": [ORG]})
        self.server.answers = [token("one"), page, page, problem(401), token("two"), page]
        with unittest.mock.patch.dict(sys.modules, {"cryptography.exceptions": None}):  # as if it were not installed
            hub = self.client(gpuaas.ServiceAccountCredential("sa", "key", "pem"))
        for _ in range(3):
            list(hub.list_orgs())
        sent = [headers.get("Authorization") for _, _, headers, _ in self.server.seen]
        self.assertEqual([None, "Bearer one", "Bearer one", "Bearer one", None, "Bearer two"], sent)
        self.assertEqual("pem", self.server.seen[0][3]["private_key_pem"])

    def test_a_followed_stream_that_ends_goes_on_after_the_last_event(self) -> None:
        self.server.answers = [(200, {}, event(1) + event(2)), problem(503), (200, {}, event(3)), problem(403)]
        events = self.hub.events(subject="u")
        self.assertEqual([1, 2, 3], [next(events).pos for _ in range(3)])
        self.assertEqual("2", self.server.seen[2][2]["Last-Event-Id"])
        with self.assertRaises(gpuaas.ProblemError):
            next(events)

    def test_a_stream_that_ends_within_an_event_goes_on_before_it(self) -> None:
        # Without TLS and without a length, the end of a lost connection looks like that of the answer.
        whole = event(2, subject="\N{EURO SIGN}")
        cuts = [whole[: whole.index(b"pos")], whole[: whole.index("\N{EURO SIGN}".encode()) + 1], whole[:-1]]
        for cut in cuts:
            self.server.seen.clear()
            self.server.answers = [(200, {}, event(1) + cut), (200, {}, whole)]
            events = self.hub.events()
            self.assertEqual([1, 2], [next(events).pos for _ in range(2)])
            self.assertEqual("1", self.server.seen[1][2]["Last-Event-Id"])
            self.server.answers = [(200, {}, event(1) + cut)]
            events = self.hub.events(follow=False)
            self.assertEqual(1, next(events).pos)
            with self.assertRaises(gpuaas.UnreachableError):
                next(events)

    def test_a_followed_stream_goes_on_where_the_hub_said_that_it_was(self) -> None:
        self.server.answers = [(200, {}, b"id: 7\n\nid: 8\nevent: t\n"), (200, {}, b":\n\n"), problem(403)]
        with self.assertRaises(gpuaas.ProblemError):
            next(self.hub.events())
        self.assertEqual([None, "7", "7"], [headers.get("Last-Event-Id") for _, _, headers, _ in self.server.seen])


if __name__ == "__main__":
    unittest.main()
