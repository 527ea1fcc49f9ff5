"""How requests are sent: credentials, retries, problems as exceptions, pages, events."""

from __future__ import annotations

import http.client
import json
import random
import ssl
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode, urlsplit

from . import assertion
from .api_gen import AppInstance, AppInstanceStatus, Event, Operations, Problem, ServiceAccountTokenRequest, Token
from .codec import decode, encode

T = TypeVar("T")

BASE_PATH = "/api/v1"
MAX_ATTEMPTS = 6
MAX_WAIT_SECONDS = 60.0
MAX_BACKOFF_SECONDS = 5.0
PAGE_SIZE = 200
STREAM_AGAIN_SECONDS = 1.0


class ProblemError(Exception):
    """The hub refused a request; problem says why, and headers are those of the answer."""

    def __init__(self, problem: Problem, retry_after: float | None = None, headers: Message | None = None) -> None:
        places = "".join(f"; {e.pointer}: {e.reason}" for e in problem.errors or [])
        super().__init__(f"{problem.detail}{places} ({problem.code}, correlation id {problem.correlation_id})")
        self.problem = problem
        self.retry_after = retry_after
        self.headers = headers or Message()


class UnreachableError(ConnectionError):
    """The hub did not answer, or not to the end."""


class WrongStatusError(Exception):
    """An instance ended somewhere else than where it was waited for."""

    def __init__(self, instance: AppInstance, wanted: str) -> None:
        reason = f": {instance.status_reason}" if instance.status_reason else ""
        super().__init__(f"app instance {instance.id} is {instance.status} instead of {wanted}{reason}")
        self.instance = instance


class Credential(Protocol):
    """Gives the bearer token for a request; it may mint one."""

    def bearer(self, hub: Client) -> str:
        """Return a token that is good for a while."""

    def forget(self) -> bool:
        """Drop a token that the hub refused; report whether the next one will be another."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The API never redirects; following one would carry the token elsewhere."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class _Token:
    def __init__(self, token: str) -> None:
        self._token = token

    def bearer(self, hub: Client) -> str:
        return self._token

    def forget(self) -> bool:
        return False


class ServiceAccountCredential:
    """Mints short-lived tokens with the key of a service account, and renews them before they end.

    With the package cryptography (pip install gpuaas[assertion]) it proves the key by a signed assertion (RFC 7523),
    and the key stays here. Without it, the key itself is sent to the hub over TLS.
    """

    def __init__(self, account_id: str, key_id: str, private_key_pem: str) -> None:
        self._sign = assertion.signer(account_id, key_id, private_key_pem)
        self._request = ServiceAccountTokenRequest(
            service_account_id=account_id, key_id=key_id, private_key_pem=private_key_pem
        )
        self._lock = threading.Lock()
        self._token: Token | None = None
        self._renew_at = 0.0

    def bearer(self, hub: Client) -> str:
        """Return a token with more than a fifth of its life left."""
        with self._lock:
            if self._token is None or time.monotonic() >= self._renew_at:
                began = time.monotonic()
                self._token = self._mint(hub.without_credential())
                self._renew_at = began + 0.8 * self._token.expires_in
            return self._token.access_token

    def _mint(self, hub: Client) -> Token:
        if self._sign is None:
            return hub.mint_service_account_token(self._request)
        for again in (True, False):
            request = ServiceAccountTokenRequest(grant_type=assertion.GRANT_TYPE, assertion=self._sign())
            try:
                return hub.mint_service_account_token(request)
            except ProblemError as refused:
                # Where an answer was lost, the hub has seen the assertion before, and each is good for one token.
                if refused.problem.status != 401 or not again:
                    raise
        raise AssertionError("the second attempt answers or raises")

    def forget(self) -> bool:
        """Drop the token: the next request mints one."""
        with self._lock:
            self._token, had = None, self._token is not None
            return had


class Client(Operations):
    """A connection to one hub. It is safe for concurrent use.

    url is scheme, host and port. ca_file is the hub's authority; without one the system's count. timeout is for each
    read from the network, in seconds. sleep is what waits between attempts.
    """

    def __init__(
        self,
        url: str,
        *,
        credential: Credential | str | None = None,
        ca_file: str | None = None,
        timeout: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        parts = urlsplit(url)
        if not parts.netloc or parts.scheme not in ("https", "http"):
            raise ValueError("the hub's URL must look like https://host:port")
        if parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise ValueError("plain http would show the credential to the network; use https")
        self._url = f"{parts.scheme}://{parts.netloc}{BASE_PATH}"
        self._credential = _Token(credential) if isinstance(credential, str) else credential
        # Without a proxy: it would get the credential of a plain request to this machine.
        self._opener = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=ca_file)
            self._opener = urllib.request.build_opener(_NoRedirects, urllib.request.HTTPSHandler(context=context))
        self._timeout = timeout
        self._sleep = sleep
        self._recorded: Message | None = None

    def without_credential(self) -> Client:
        """Return a client of the same hub for operations that need no token."""
        return self._copy(_credential=None, _recorded=None)

    def recording(self) -> Client:
        """Return a client of the same hub whose headers are those of its last answer; it is for one thread."""
        return self._copy(_recorded=Message())

    @property
    def headers(self) -> Message:
        """The headers of the last answer to this client, which recording() made: ETag, X-Request-ID and others."""
        if self._recorded is None:
            raise ValueError("only a client that recording() made keeps headers")
        return self._recorded

    def _copy(self, **changed: Any) -> Client:
        other = Client.__new__(Client)
        other.__dict__.update(self.__dict__, **changed)
        return other

    def wait_app_instance(
        self, project_id: str, app_instance_id: str, status: AppInstanceStatus, *, timeout: float = 300.0
    ) -> AppInstance:
        """Watch an instance until it has the status; WrongStatusError where it cannot get there any more."""
        ends = {"decommissioned"} if status == "decommissioned" else {"decommissioned", "decommissioning", "failed"}
        deadline = time.monotonic() + timeout
        after = 0
        while True:
            instance = self.get_app_instance(project_id, app_instance_id, after=after or None, wait="20s")
            if instance.status == status:
                return instance
            if instance.status in ends:
                raise WrongStatusError(instance, status)
            if time.monotonic() >= deadline:
                raise TimeoutError(f"app instance {app_instance_id} is still {instance.status}")
            if instance.resource_version == after:
                self._sleep(1.0)
            after = instance.resource_version

    def events(self, *, follow: bool = True, last_event_id: str | None = None, **filters: Any) -> Iterator[Event]:
        """Yield events in their order; filters are those of stream_events.

        A followed stream that breaks or ends is opened again where it was: after the last event, or where the hub said
        that it was since. An event may come twice.
        """
        while True:
            # An empty line ends an event: what has none was cut off.
            place: str | None = None
            data: str | None = None
            try:
                for line in self.stream_events(follow=follow, last_event_id=last_event_id, **filters):
                    if line.startswith("data: "):
                        data = line[len("data: ") :]
                    elif line.startswith("id: "):
                        place = line[len("id: ") :]
                    elif not line and data:
                        event = decode(Event, json.loads(data))
                        yield event
                        last_event_id, place, data = str(event.pos), None, None
                    elif not line and place:
                        last_event_id, place = place, None
                if data or place:
                    raise UnreachableError("the stream ended within an event")
            except UnreachableError:
                if not follow:
                    raise
            except ProblemError as refused:
                if not follow or refused.problem.status < 500 and refused.problem.status != 429:
                    raise
            if not follow:
                return
            self._sleep(STREAM_AGAIN_SECONDS)

    def _call(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str | None] | None = None,
        body: Any = None,
    ) -> T:
        data = None if body is None else json.dumps(encode(body)).encode()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            if attempt == 1:
                sent = self._headers(method, headers, data)
            try:
                with self._open(method, path, query, sent, data) as response:
                    content = response.read()
                return decode(answer, json.loads(content) if content else None)
            except ProblemError as refused:
                if refused.problem.status not in (429, 502, 503, 504) or attempt == MAX_ATTEMPTS:
                    raise
                self._sleep(_wait(attempt, refused.retry_after))
            except (http.client.HTTPException, OSError) as lost:
                if isinstance(lost, ssl.SSLCertVerificationError) or attempt == MAX_ATTEMPTS:
                    raise lost if isinstance(lost, UnreachableError) else UnreachableError(str(lost)) from lost
                self._sleep(_wait(attempt, None))
        raise AssertionError("the last attempt answers or raises")

    def _lines(
        self,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str | None] | None = None,
    ) -> Iterator[str]:
        try:
            with self._open("GET", path, query, self._headers("GET", headers, None), None) as response:
                for line in response:
                    yield line.decode(errors="replace").rstrip("\r\n")
        except (http.client.HTTPException, OSError) as lost:
            raise lost if isinstance(lost, UnreachableError) else UnreachableError(str(lost)) from lost

    def _pages(self, path: str, page: type[Any], *, query: Mapping[str, Any]) -> Iterator[Any]:
        cursor: str | None = None
        while True:
            answer: Any = self._call("GET", path, page, query={**query, "cursor": cursor, "limit": PAGE_SIZE})
            yield from answer.items
            if not answer.next_cursor or answer.next_cursor == cursor:
                return
            cursor = answer.next_cursor

    def _headers(
        self, method: str, headers: Mapping[str, str | None] | None, data: bytes | None
    ) -> dict[str, str]:
        sent = {
            "Accept": "application/json, application/problem+json, */*;q=0.5",
            "User-Agent": "gpuaas-python",
            "X-Request-ID": str(uuid.uuid4()),
        }
        sent.update((name, value) for name, value in (headers or {}).items() if value is not None)
        if method == "POST":
            # One key for all attempts: a retry after a lost answer must not act twice.
            sent.setdefault("X-Idempotency-Key", str(uuid.uuid4()))
        if data is not None:
            sent["Content-Type"] = "application/json"
        return sent

    def _open(
        self, method: str, path: str, query: Mapping[str, Any] | None, headers: dict[str, str], data: bytes | None
    ) -> http.client.HTTPResponse:
        """Send a request once, and once more where the hub does not know the token any more."""
        given = {
            name: [_text(one) for one in value] if isinstance(value, list) else _text(value)
            for name, value in (query or {}).items()
            if value is not None
        }
        url = self._url + path + ("?" + urlencode(given, doseq=True) if given else "")
        for again in (True, False):
            if self._credential is not None:
                headers = {**headers, "Authorization": "Bearer " + self._credential.bearer(self)}
            request = urllib.request.Request(url, data=data, headers=headers, method=method)
            try:
                response: http.client.HTTPResponse = self._opener.open(request, timeout=self._timeout)
                self._record(response.headers)
                return response
            except urllib.error.HTTPError as refused:
                with refused:
                    problem = _problem(refused)
                self._record(refused.headers)
                if refused.code == 401 and again and self._credential is not None and self._credential.forget():
                    continue
                raise problem from None
            except urllib.error.URLError as lost:
                if isinstance(lost.reason, ssl.SSLCertVerificationError):
                    raise lost.reason from None
                raise UnreachableError(str(lost.reason)) from lost
        raise AssertionError("the second attempt answers or raises")

    def _record(self, headers: Message) -> None:
        if self._recorded is not None:
            self._recorded = headers


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(encode(value))


def _wait(attempt: int, retry_after: float | None) -> float:
    if retry_after is not None:
        return min(retry_after, MAX_WAIT_SECONDS)
    return random.uniform(0, min(MAX_BACKOFF_SECONDS, 0.2 * 2**attempt))


def _problem(refused: urllib.error.HTTPError) -> ProblemError:
    after = refused.headers.get("Retry-After", "")
    try:
        problem = decode(Problem, json.loads(refused.read()))
    except (ValueError, TypeError, OSError):
        # Not the hub's own answer, but that of a proxy before it.
        problem = Problem(
            type="about:blank", title=refused.reason, status=refused.code, code="", detail=str(refused.reason),
            correlation_id="",
        )
    return ProblemError(problem, float(after) if after.isdigit() else None, refused.headers)
