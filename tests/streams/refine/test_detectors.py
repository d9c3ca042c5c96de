"""One suite for every detector, and what each of our rules finds."""

from __future__ import annotations

import os

import pytest

from infra.errors import DetectorError
from producers.gateway.sessions import Sessions
from streams.refine.detectors.base import Hit
from streams.refine.detectors.guard import Guarded
from streams.refine.detectors.kingfisher import Kingfisher
from streams.refine.detectors.rules import luhn, mod97
from streams.refine.detectors.vectorscan import CAP, Vectorscan

AWS = "AKIAQYLPMN5HHHFPZAM2"
GITHUB = "ghp_16C7e42F292c6912E7710c838347Ae178B4a"


@pytest.fixture(scope="module")
def vectorscan():
    return Vectorscan()


@pytest.fixture(scope="module", params=["vectorscan", pytest.param("kingfisher", marks=pytest.mark.slow), "guarded"])
def detector(request, vectorscan, tmp_path_factory):
    if request.param == "vectorscan":
        yield vectorscan
    elif request.param == "kingfisher":
        os.environ.setdefault("KF_RULE_CACHE_DIR", str(tmp_path_factory.mktemp("kingfisher")))
        yield Kingfisher()
    else:
        guarded = Guarded(["streams.refine.detectors.vectorscan:Vectorscan"])
        yield guarded
        guarded.close()


def test_it_finds_a_token_where_it_lies(detector):
    text = f"first line\nexport TOKEN={GITHUB} # mine\n".encode()
    hits = [hit for hit in detector.scan(text) if hit.blocks]
    assert any(text[hit.start : hit.end].decode().endswith(GITHUB) for hit in hits)


def test_the_same_text_gives_the_same_hits(detector):
    text = f"{GITHUB} and {AWS} and 4111 1111 1111 1111".encode()
    assert detector.scan(text) == detector.scan(text)


def test_spans_are_ordered_and_inside(detector):
    text = f"{GITHUB} x {GITHUB} é {AWS}".encode()
    hits = detector.scan(text)
    assert hits == sorted(hits)
    assert all(0 <= hit.start < hit.end <= len(text) for hit in hits)


def test_clean_text_and_none_have_no_blocking_hits(detector):
    for text in (b"", b"def sort(xs): return sorted(xs)  # 3 1 4 1 5 9 -> 1 1 3 4 5 9", b"\x00\xff\xfe"):
        assert [hit for hit in detector.scan(text) if hit.blocks] == []


def test_the_version_says_what_it_is(detector):
    assert detector.version()


FOUND = {
    "aws_key": f"id {AWS} end",
    "aws_secret": "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzzKEY",
    "private_key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA PRIVATE KEY-----",
    "github_token": GITHUB,
    "gitlab_token": "glpat-Ab1Cd2Ef3Gh4Ij5Kl6Mn",
    "slack_token": "xoxb-123456789012-abcdefABCDEF",
    "stripe_key": "sk_live_4eC39HqLyjWDarjtT1zdp7dc",
    "anthropic_key": "sk-ant-api03-AbCdEfGhIjKlMnOpQrStUvWx12",
    "openai_key": "sk-proj-AbCdEfGhIjKlMnOpQrStUvWx1234",
    "google_key": "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "huggingface_token": "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "millrace_key": "key mr-0190f3a2-7c1b-7d3e-8f00-1234567890ab." + "0123456789abcdef" * 2,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTYifQ.dBjftJeZ4CVP",
    "bearer": "Authorization: Bearer abcDEF123456ghiJKL7890",
    "url_password": "postgres://app:s3cr3tpw@db.example/x",
    "password": 'password = "Tr0ub4dor&3x9"',
    "card": "card 4111 1111 1111 1111 ok",
    "iban": "IBAN DE89 3704 0044 0532 0130 00 now",
    "phone": "call +49 30 901820 today",
    "ssn": "SSN: 078-05-1120",
}
"""kind -> a text that holds one"""

LABELS = {"email": "mail jane.doe@example.com", "ipv4": "host 192.168.7.21 up"}

CLEAN = {
    "digits of no card": "4111 1111 1111 1112",
    "a long id": "order 1234567890123456 shipped",
    "a code lookup": 'password = os.environ["DB_PASSWORD"]',
    "a template": 'token: "${SECRET_TOKEN}"',
    "a bare ssn shape": "078-05-1120",
    "a plus date": "+2024-05-01",
    "a uuid": "0190f3a2-7c1b-7d3e-8f00-1234567890ab",
    "a uuid with a card's checksum": "chatcmpl-38c1962e-4822-2334-8896-58716addb17a",
    "six digits to sort": "6 4 1 9 2 7 sorted is 1 2 4 6 7 9",
}


def test_our_rules_find_the_keys_that_the_gateway_makes(vectorscan, tmp_path):
    sessions = Sessions(tmp_path, "p")
    key = sessions.key_of(sessions.unsolicited("t", None, (), 0))
    (hit,) = [hit for hit in vectorscan.scan(f'api_key={key}"'.encode()) if hit.kind == "millrace_key"]
    assert (hit.start, hit.end, hit.blocks) == (8, 8 + len(key), True)


@pytest.mark.parametrize("kind", FOUND)
def test_our_rules_find(vectorscan, kind):
    text = FOUND[kind].encode()
    assert kind in {hit.kind for hit in vectorscan.scan(text) if hit.blocks}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_never_block(vectorscan, kind):
    assert [(hit.kind, hit.blocks) for hit in vectorscan.scan(LABELS[kind].encode())] == [(kind, False)]


@pytest.mark.parametrize("what", CLEAN)
def test_our_rules_leave_alone(vectorscan, what):
    assert [hit for hit in vectorscan.scan(CLEAN[what].encode()) if hit.blocks] == []


def test_the_whole_key_is_taken_not_its_first_line(vectorscan):
    text = FOUND["private_key"].encode()
    hit = next(hit for hit in vectorscan.scan(text) if hit.kind == "private_key")
    assert (hit.start, hit.end) == (0, len(text))


def test_dense_text_is_bounded_and_still_blocked(vectorscan):
    labels = b"\n".join(b"10.0.%d.%d" % (n // 250, n % 250) for n in range(4 * CAP))
    assert len(vectorscan.scan(labels)) == CAP
    cards = b"\n".join(b"4111 1111 1111 1111" for _ in range(2 * CAP))
    hits = vectorscan.scan(cards)
    assert len(hits) == 2 * CAP
    assert {hit.detector for hit in hits} == {"vectorscan", "vectorscan:dense"}


def test_checksums():
    assert luhn(b"4111111111111111")
    assert not luhn(b"4111111111111112")
    assert mod97(b"DE89370400440532013000")
    assert not mod97(b"DE88370400440532013000")


@pytest.fixture(scope="module")
def dying():
    guarded = Guarded(["tests.support.dying:Dying"], timeout_s=2.0)
    yield guarded
    guarded.close()


@pytest.mark.slow
@pytest.mark.parametrize("text", [b"die", b"hang", b"raise"])
def test_a_crash_or_a_hang_costs_one_scan(dying, text):
    with pytest.raises(DetectorError) as caught:
        dying.scan(text)
    assert "quotes" not in str(caught.value)
    assert dying.scan(b"abc") == [Hit(0, 3, "all", "dying", True)]


@pytest.mark.slow
def test_a_detector_that_cannot_be_made_is_said_at_once():
    with pytest.raises(DetectorError, match="did not start"):
        Guarded(["streams.refine.detectors.base:Nothing"])
