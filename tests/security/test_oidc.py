"""Users who are identified by the tokens of an OpenID Connect provider, which runs in this process."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from fastapi.testclient import TestClient

from app.errors import BadSetting, Unauthorized
from app.main import create_app
from app.maintenance import doctor
from app.security import keys, oidc
from app.security.oidc import provider_of
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import Key
from tests.harness.requests import JOB, PATH, key_for
from tests.harness.runs import until

AUDIENCE = "accrue"
FIRST = rsa.generate_private_key(65537, 2048)


class Issuer:
    """A provider: its discovery document, its keys, and the tokens that it signs."""

    def __init__(self) -> None:
        self.private: dict[str, Any] = {"first": FIRST}
        self.published = ["first"]
        self.reads = 0
        self.fails = False
        self.calls_itself: str | None = None
        self.names_algorithms = True
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.reads += 1
                self.send_response(500 if issuer.fails else 200)
                self.end_headers()
                self.wfile.write(json.dumps(issuer.document(self.path)).encode())

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/realm"

    def document(self, path: str) -> dict[str, Any]:
        if path.endswith("openid-configuration"):
            return {"issuer": self.calls_itself or self.url, "jwks_uri": f"{self.url}/keys"}
        return {"keys": [self.public(name) for name in self.published]}

    def public(self, name: str) -> dict[str, Any]:
        private = self.private[name]
        algorithm: Any = jwt.algorithms.ECAlgorithm if name == "curve" else jwt.algorithms.RSAAlgorithm
        found = algorithm.to_jwk(private.public_key(), as_dict=True)
        named = {"alg": "ES256" if name == "curve" else "RS256"} if self.names_algorithms else {}
        return {**found, "kid": name, "use": "sig", **named}

    def token(
        self, subject: str = "alice", *, key: str = "first", algorithm: str = "RS256", **claims: Any
    ) -> str:
        own = {"iss": self.url, "aud": AUDIENCE, "sub": subject, "exp": time.time() + 60, **claims}
        payload = {name: value for name, value in own.items() if value is not None}
        return jwt.encode(payload, self.private[key], algorithm=algorithm, headers={"kid": key})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    made = Issuer()
    yield made
    made.close()


@pytest.fixture
def sso(settings: Settings, issuer: Issuer) -> Settings:
    return settings.model_copy(
        update={
            "oidc_issuer": issuer.url, "oidc_audience": AUDIENCE, "oidc_admin_group": "ops", "gpus": "24GB"
        }
    )  # fmt: skip


@pytest.fixture
def service(sso: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(sso), base_url="http://127.0.0.1:8000") as client:
        yield client


def by(token: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", **more}


def database_of(client: TestClient) -> Database:
    found: Database = client.app.state.database  # type: ignore[attr-defined]
    return found


def test_users_see_their_own_jobs_and_admins_all(service: TestClient, issuer: Issuer) -> None:
    alice, bob = by(issuer.token("alice")), by(issuer.token("bob"))
    admin = by(issuer.token("carol", groups=["users", "ops"]))
    made = service.post(f"{PATH}/with-accumulation", json=JOB, headers=alice).json()["id"]
    assert service.get(f"{PATH}/{made}", headers=alice).status_code == 200
    assert service.get(f"{PATH}/{made}", headers=bob).status_code == 404
    assert service.get(f"{PATH}/{made}", headers=admin).status_code == 200
    assert service.get("/metrics", headers=alice).status_code == 403
    assert service.get("/metrics", headers=admin).status_code == 200


def test_a_user_has_a_row_among_the_keys(service: TestClient, issuer: Issuer) -> None:
    for email in ("alice@old.example", "alice@new.example"):
        assert service.get("/v1/models", headers=by(issuer.token("alice", email=email))).status_code == 200
        row = row_of(service)
        assert (row.id[:5], row.scopes) == ("user-", ["read", "write"])
    until(lambda: row_of(service).name == "alice@new.example")


def row_of(service: TestClient) -> Key:
    """The row of the only user, which is written beside the request."""

    def rows() -> list[Key]:
        with database_of(service).reading() as session:
            return session.query(Key).all()

    until(lambda: len(rows()) == 1)
    return rows()[0]


def test_a_user_does_not_wait_for_a_write(service: TestClient, issuer: Issuer) -> None:
    service.get("/v1/models", headers=by(issuer.token("bob")))
    row_of(service)
    with database_of(service).writing():  # as a process that keeps the database busy
        began = time.monotonic()
        for token in (issuer.token("alice"), issuer.token("bob", email="another@name"), issuer.token("bob")):
            assert service.get("/v1/models", headers=by(token)).status_code == 200
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("algorithm", ["RS256", "RS512", "PS256"])
def test_a_key_without_an_algorithm_may_use_any_of_its_type(
    service: TestClient, issuer: Issuer, algorithm: str
) -> None:
    issuer.names_algorithms = False
    assert service.get("/v1/models", headers=by(issuer.token(algorithm=algorithm))).status_code == 200


def test_a_key_with_an_algorithm_may_use_no_other(service: TestClient, issuer: Issuer) -> None:
    assert service.get("/v1/models", headers=by(issuer.token(algorithm="RS512"))).status_code == 401


@pytest.mark.parametrize(
    ("claims", "name"),
    [
        ({"email": "a@b"}, "a@b"),
        ({"email": "boss@b", "email_verified": False, "preferred_username": "al"}, "al"),
        ({"name": "al\x1b[2J\nkey-1  admin\u202e"}, "al [2J key-1  admin "),
        ({"email": ["x"], "name": 7}, "alice"),
        ({"name": "  "}, "alice"),
    ],
)
def test_names_are_text_that_can_be_shown(
    service: TestClient, issuer: Issuer, claims: dict[str, Any], name: str
) -> None:
    assert service.get("/v1/models", headers=by(issuer.token("alice", **claims))).status_code == 200
    assert row_of(service).name == name


def test_a_revoked_user_is_locked_out(
    service: TestClient, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_KNOWN_FOR_SECONDS", 0.0)  # instead of waiting until the cached result is old
    token = by(issuer.token("alice"))
    assert service.get("/v1/models", headers=token).status_code == 200
    row, database = row_of(service), database_of(service)
    with database.writing() as session:
        keys.revoke(session, row.id)
    answer = service.get("/v1/models", headers=token)
    assert (answer.status_code, "revoked" in answer.json()["detail"]) == (401, True)
    assert service.get("/v1/models", headers=by(issuer.token("alice", email="x@y"))).status_code == 401


def test_a_request_needs_a_token_or_a_key(service: TestClient) -> None:
    assert service.get("/v1/models").status_code == 401
    assert service.get("/v1/models", headers=by("anything")).status_code == 401
    assert service.get("/v1/models", headers=key_for(database_of(service), "read")).status_code == 200
    assert service.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exp": 1}, "has expired"),
        ({"aud": "another"}, "for another service"),
        ({"aud": None}, "not valid"),
        ({"iss": "https://evil.example"}, "not of the issuer"),
        ({"exp": None}, "not valid"),
        ({"sub": None}, "not valid"),
        ({"nbf": 2**33}, "not valid"),
        ({"sub": 7}, "not valid"),
        ({"sub": ""}, "names no user"),
        ({"exp": 2**40}, "longer than a week"),
    ],
)
def test_claims_are_checked(service: TestClient, issuer: Issuer, changes: dict[str, Any], said: str) -> None:
    answer = service.get("/v1/models", headers=by(issuer.token(**changes)))
    assert answer.status_code == 401
    assert said in answer.json()["detail"]


def test_signatures_are_checked(service: TestClient, issuer: Issuer) -> None:
    issuer.private["other"] = rsa.generate_private_key(65537, 2048)
    claims = {"iss": issuer.url, "aud": AUDIENCE, "sub": "alice", "exp": time.time() + 60}
    public = issuer.private["first"].public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    head, body, signature = issuer.token().split(".")
    _, admin, _ = issuer.token(groups=["ops"]).split(".")

    def signed(key: Any, algorithm: str) -> str:
        return jwt.encode(claims, key, algorithm=algorithm, headers={"kid": "first"})

    forged = [
        signed(issuer.private["other"], "RS256"),
        jwt.encode(claims, None, algorithm="none", headers={"kid": "first"}),
        f"{head}.{admin}.{signature}",
        f"{head}.{body}.",
        f"{head}.{body}.{signature[:-4]}AAAA",
        "a.b.c",
        f"{'a' * 20000}.b.c",
    ]
    monkey = jwt.algorithms.HMACAlgorithm.prepare_key
    jwt.algorithms.HMACAlgorithm.prepare_key = lambda self, key: (
        key if isinstance(key, bytes) else key.encode()
    )
    try:
        forged.append(signed(pem, "HS256"))  # the public key as a shared secret
    finally:
        jwt.algorithms.HMACAlgorithm.prepare_key = monkey
    for token in forged:
        assert service.get("/v1/models", headers=by(token)).status_code == 401, token[:80]
    with database_of(service).reading() as session:
        assert session.query(Key).count() == 0


def test_a_new_key_of_the_provider_is_found_but_not_searched_for_at_every_request(
    service: TestClient, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.get("/v1/models", headers=by(issuer.token())).status_code == 200
    issuer.private["curve"] = ec.generate_private_key(ec.SECP256R1())
    issuer.published.append("curve")
    reads = issuer.reads
    token = by(issuer.token(key="curve", algorithm="ES256"))
    for _ in range(5):
        assert service.get("/v1/models", headers=token).status_code == 401
    assert issuer.reads == reads
    monkeypatch.setattr(oidc, "_RETRY_SECONDS", 0.0)
    assert service.get("/v1/models", headers=token).status_code == 200


def test_known_keys_stay_if_the_provider_fails(
    service: TestClient, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(oidc, "_FRESH_SECONDS", 0.0)
    issuer.fails = True
    assert service.get("/v1/models", headers=by(issuer.token())).status_code == 503
    issuer.fails = False
    assert service.get("/v1/models", headers=by(issuer.token())).status_code == 200
    issuer.fails = True
    assert service.get("/v1/models", headers=by(issuer.token("bob"))).status_code == 200


def test_another_issuers_document_is_refused(service: TestClient, issuer: Issuer) -> None:
    issuer.calls_itself = "https://evil.example"
    assert service.get("/v1/models", headers=by(issuer.token())).status_code == 503


def test_only_members_of_the_group_may_use_the_service(sso: Settings, issuer: Issuer) -> None:
    limited = sso.model_copy(update={"oidc_group": "lab", "oidc_groups_claim": "roles"})
    with TestClient(create_app(limited), base_url="http://127.0.0.1:8000") as client:
        assert client.get("/v1/models", headers=by(issuer.token(roles=["lab"]))).status_code == 200
        assert client.get("/v1/models", headers=by(issuer.token(roles="lab"))).status_code == 200
        for claims in (
            {},
            {"roles": ["laboratory"]},
            {"groups": ["lab"]},
            {"roles": [{"lab": 1}]},
            {"roles": {"lab": 1}},
            {"roles": 7},
        ):
            answer = client.get("/v1/models", headers=by(issuer.token(**claims)))
            assert (answer.status_code, "group lab" in answer.json()["detail"]) == (403, True)


def test_pages_of_other_sites_cannot_use_a_proxys_sign_in(service: TestClient, issuer: Issuer) -> None:
    """The proxy adds the token to whatever the browser sends, and passes the public name on as Host."""
    token, public = issuer.token(), {"Host": "accrue.example"}
    fine = [
        {},
        {"Origin": "https://accrue.example", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
    ]
    for more in fine:
        assert service.get("/v1/models", headers=by(token, **public, **more)).status_code == 200, more
    for more in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = service.post(f"{PATH}/with-accumulation", json=JOB, headers=by(token, **public, **more))
        assert answer.status_code == 403, more
    assert service.get("/v1/models", headers=public).status_code == 403, "without a token, as before"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"oidc_audience": None}, "ACCRUE_OIDC_AUDIENCE"),
        ({"oidc_issuer": "http://login.example.com"}, "is not an https:// address"),
        ({"oidc_issuer": None}, "ACCRUE_OIDC_ISSUER is not set"),
    ],
)
def test_settings_that_would_be_unsafe_are_refused(sso: Settings, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        provider_of(sso.model_copy(update=changes))


def test_doctor_reads_the_providers_keys(sso: Settings, issuer: Issuer) -> None:
    assert doctor._sign_in(sso).message.endswith("can be read (1)")
    issuer.calls_itself = "https://evil.example"
    found = doctor._sign_in(sso)
    assert (found.verdict, "it calls itself" in found.message) == ("error", True)


def test_without_a_provider_tokens_mean_nothing(client: TestClient) -> None:
    """As before: without keys, any text in place of a key is the local user's."""
    assert client.get("/v1/models", headers=by("a.b.c")).status_code == 200


def test_identities_of_two_issuers_differ(settings: Settings, tmp_path: Path) -> None:
    first, second = Issuer(), Issuer()
    found = set()
    try:
        for issuer in (first, second):
            made = provider_of(
                settings.model_copy(update={"oidc_issuer": issuer.url, "oidc_audience": AUDIENCE})
            )
            assert made is not None
            found.add(made.identify(issuer.token("alice")).id)
            with pytest.raises(Unauthorized):
                made.identify((second if issuer is first else first).token("alice"))
    finally:
        first.close()
        second.close()
    assert len(found) == 2
