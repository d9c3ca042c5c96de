"""One suite for every detector, and what each of our rules finds."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.errors import DetectorError
from millrace.infra.principals.book import new_key
from millrace.producers.gateway.sessions.ownership import Hints
from millrace.producers.gateway.sessions.sessions import Sessions
from millrace.streams.refine import personal
from millrace.streams.refine.detectors import structure
from millrace.streams.refine.detectors.base import Hit
from millrace.streams.refine.detectors.guard import GuardedDetectors
from millrace.streams.refine.detectors.kingfisher import Kingfisher
from millrace.streams.refine.detectors.rule_cache import keep_rules
from millrace.streams.refine.detectors.rules import luhn, mod97
from millrace.streams.refine.detectors.vectorscan import CAP, Vectorscan
from millrace.testing import check_detector

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
        keep_rules(tmp_path_factory.mktemp("kingfisher"))
        yield Kingfisher()
    else:
        guarded = GuardedDetectors(["millrace.streams.refine.detectors.vectorscan:Vectorscan"])
        yield guarded
        guarded.close()


def test_it_keeps_the_contract(detector):
    texts = [
        f"first line\nexport TOKEN={GITHUB} # mine\n",
        f"{GITHUB} x {AWS} é {GITHUB}",
        f"4111 1111 1111 1111 {GITHUB}",
    ]
    code = "def sort(xs): return sorted(xs)  # 3 1 4 1 5 9 -> 1 1 3 4 5 9"
    check_detector(detector, [(text, GITHUB) for text in texts], clean=["", code])


def test_a_key_of_a_client_is_a_secret_and_its_id_is_none(vectorscan):
    id, key = new_key()
    text = f"{id} was given {key}."
    (hit,) = [hit for hit in vectorscan.scan(text.encode()) if hit.blocks]
    assert (text[hit.start : hit.end], hit.kind) == (key, "millrace_key")


def test_bytes_that_are_no_text_have_no_blocking_hits(detector):
    assert [hit for hit in detector.scan(b"\x00\xff\xfe") if hit.blocks] == []


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
    "putty_key": "PuTTY-User-Key-File-3: ssh-rsa\nPrivate-Lines: 1\nAAAAB3NzaC1yc2EAAAADAQAB\nPrivate-MAC: 12ab",
    "basic_auth": "Authorization: Basic dXNlcjpUcjB1YjRkb3ItaG9yc2U=",
    "netrc": "machine api.example.com login joe password Xy7-horses",
    "password_hash": f"root:$6$saltsalt${'aB3./' * 17}x:19000:0:99999:7:::",
    "cookie": "Cookie: theme=dark; sid=8f3KxPq2Zr7LmN4vB1c6",
    "api_header": "X-Api-Key: 8f3KxPq2Zr7LmN4vB1c6",
    "aws_session_token": f"export AWS_SESSION_TOKEN={'FwoGZXIvYXdzEBYaD' * 8}",
    "azure_sas": "https://a.blob.core.windows.net/c?sv=2023-01-03&sig=q83vASNFZ4mrze8BI0VniavN7wEjRWeJq83vASNFZ4k%3D&se=1",
    "signed_url": f"https://b.s3.amazonaws.com/k?X-Amz-Signature={'0123456789abcdef' * 4}",
    "discord_webhook": f"https://discord.com/api/webhooks/123456789012345678/{'aB3_' * 17}",
    "discord_token": f"MTIzNDU2Nzg5MDEyMzQ1Njc4.GaBcDe.{'aB3_' * 9}",
    "google_client_secret": f"GOCSPX-{'aB3_' * 7}",
    "google_refresh_token": f"1//0{'aB3_' * 12}",
    "azure_secret": f"abc8Q~{'aB3_' * 8}xy",
    "service_key": "DD_API_KEY=0123456789abcdef0123456789abcdee",
    "eth_key": f"private key: 0x{'0123456789abcdef' * 4}",
    "wallet_key": "5HueCGU8rMjxEXxiPuD5BDku4MkFqeZyd4dZ1jvhTVqvbTLvyTJ",
    "seed_phrase": "seed phrase: legal winner thank year wave sausage worth useful legal winner thank yellow",
}
"""kind -> a text that holds one"""

BARE = {
    "aws_secret": "Please use wJalrXUtnFEMI/K7MDENG9bPxRfiCYzX3p8Qv5tL for the deployment.",
    "aws_secret of a list": '["a", "wJalrXUtnFEMI/K7MDENG9bPxRfiCYzX3p8Qv5tL"]',
    "aws_session_token": f"Take IQoJb3JpZ2luX2VjE{'aB3x/K9q' * 20} today.",
    "secret": f"the twilio auth token is {'0f1e2d3c4b5a6978' * 2}, he said",
    "secret of an application": f"your Datadog app key: {'0f1e2d3c4b5a6978' * 2}ab01cd23",
    "secret in a sentence": f"Please use {'aB3x/K9qZ7' * 12} for the deployment.",
    "password": "Please use Tr0ub4dor-aB3dE9fG42 for the deployment.",
    "seed_phrase": "Take legal winner thank year wave sausage worth useful legal winner thank yellow with you.",
}
"""kind -> a text that holds one without its name"""

PASSWORDS = {
    "shell": "export DB_PASSWORD=Tr0ub4dor-and-3",
    "query": "mode=rw&password=Tr0ub4dor-and-3&x=1",
    "yaml": "db:\n  password: Tr0ub4dor-and-3\n  port: 1",
    "said": "By the way, the password is Tr0ub4dor-and-3, keep it.",
    "flag": "tool --password Tr0ub4dor-and-3 run",
    "sshpass": "sshpass -p Tr0ub4dor-and-3 ssh host",
    "mysql": "mysql -u root -pTr0ub4dor-and-3 shop",
    "curl": "curl -s -u joe:Tr0ub4dor-and-3 https://example.com",
    "beside its key": 'password: "Tr0ub4dor-and-3"',
}

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
    "an order number with a card's checksum": "order 4111111111111111 shipped",
    "a float with a card's digits": "0.4111111111111111 is the share of cards",
    "a float that begins like a card": "4111111111111111.25 of the cards",
    "a number of no brand": "card 9111111111111111",
    "an unquoted variable": "password=user_password_2",
    "a placeholder": "password: changeme\ntoken: <your-token>\nsecret: ${SECRET}",
    "a rule about passwords": "The password is hashed with SHA-256 and the passphrase is required.",
    "a hash of a transaction": f"tx 0x{'0123456789abcdef' * 4}",
    "a flag": "docker run -u 1000:1000 --user app:staff image",
    "machines that learn": "machine learning password reset",
    "a commit": "the commit is 16c7e42f292c6912e7710c838347ae178b4a0f1e of main",
    "a checksum": f"sha256 {'0f1e2d3c4b5a6978' * 4} of the file",
    "a path of 40 letters": "Users/Shared/Projects/Main2024/Documents",
    "a line of base64": "wJalrXUtnFEMI/K7MDENG9bPxRfiCYzX3p8Qv5tL\n" * 4,
    "a public key": f"ssh-rsa AAAAB3NzaC1yc2E{'aB3x/K9q' * 40} joe@host",
    "an address on a chain": "send it to 7xKXtg2CW87d97TXJSDpbD5jBkheTqA83TZRuJosgAsU today",
    "a model": "Please use Qwen2.5-7B-Instruct-GPTQ for the deployment, or use Llama-3.1-8B-Instruct.",
    "an id of a call": "use call_aB3dE9fG42hJ7kL1 and chatcmpl-B9MBs8CjcvOLX2n4n574q",
    "words of the alphabet": "abandon ability able about above absent absorb abstract absurd abuse access accident",
    "twelve plain words": "they were often seen walking along this quiet river during warm summer evenings",
    "six digits to sort": "6 4 1 9 2 7 sorted is 1 2 4 6 7 9",
}

STRUCTURE = {
    "json": ('{"full_name": "Ana L\u00f3pez", "x": 1}', ["person Ana L\u00f3pez"]),
    "a weak key": ('"name": "Ana L\u00f3pez"', ["person Ana L\u00f3pez"]),
    "a weak key in another script": ("name: \u5f20\u4f1f", ["person \u5f20\u4f1f"]),
    "camel case": ('"shipTo": "Ana"', ["person Ana"]),
    "an address": ("ship_to: 12 Main Street, Springfield\nx: 1", ["address 12 Main Street, Springfield"]),
    "yaml": ("dob: 1980-02-03  # of birth\nphone: 030 901820", ["birth_date 1980-02-03", "telephone 030 901820"]),
    "mail": ("From: Ana L\u00f3pez <a>\nTo: Bo Stone <b>", ["person Ana L\u00f3pez", "person Bo Stone"]),
    "log": ("INFO login user=ana.lopez ip=1", ["person ana.lopez"]),
    "form": ("**Name:** Ana L\u00f3pez\nPassport No: X1234567", ["person Ana L\u00f3pez", "identity X1234567"]),
    "sql": (
        "INSERT INTO users (id, name, dob) VALUES (1, 'Ana', '1980-02-03'), (2, 'Bo O''Neil', NULL);",
        ["person Ana", "birth_date 1980-02-03", "person Bo O''Neil"],
    ),
    "csv": (
        'id,name,email,phone\n1,Ana,a@x,555-123-4567\n2,"Stone, Bo",b@x,\nthe end',
        ["person Ana", "telephone 555-123-4567", "person Stone, Bo"],
    ),
    "a table": ("| Name | Address |\n|---|---|\n| Ana | 12 Main St |\n", ["person Ana", "address 12 Main St"]),
    "code": ("def f(name=None, user=self.user, address='x', phone: str = ''): return name", []),
    "a tool": ('{"name": "get_weather", "type": "function", "address": "https://example.com/12 a"}', []),
    "an address on a chain": ("address: 0xdeadbeef00", []),
}
"""text -> what its structure says"""


@pytest.mark.parametrize("what", STRUCTURE)
def test_structure_says_what_a_value_is_and_labels_it(vectorscan, what):
    text, expected = STRUCTURE[what]
    data = text.encode()
    hits = [hit for hit in vectorscan.scan(data) if hit.detector == "structure"]
    assert [f"{hit.kind} {data[hit.start : hit.end].decode()}" for hit in hits] == expected
    assert not any(hit.blocks for hit in hits)


@given(st.lists(st.one_of(st.text(), st.sampled_from([text for text, _ in STRUCTURE.values()]))))
def test_structure_of_any_text_lies_in_it(vectorscan, parts):
    data = "\n".join(parts).encode("utf-8", "replace")
    assert all(0 <= hit.start < hit.end <= len(data) for hit in vectorscan.scan(data))


def test_our_rules_find_the_keys_that_the_gateway_makes(vectorscan, tmp_path):
    sessions = Sessions(tmp_path, "p")
    key = sessions.key_of(sessions.make_session("t", Hints(None, ""), (), 0))
    (hit,) = [hit for hit in vectorscan.scan(f'api_key={key}"'.encode()) if hit.kind == "millrace_key"]
    assert (hit.start, hit.end, hit.blocks) == (8, 8 + len(key), True)


@pytest.mark.parametrize("kind", FOUND)
def test_our_rules_find(vectorscan, kind):
    text = FOUND[kind].encode()
    assert kind in {hit.kind for hit in vectorscan.scan(text) if hit.blocks}


@pytest.mark.parametrize("what", BARE)
def test_our_rules_find_without_a_name(vectorscan, what):
    text = BARE[what].encode()
    assert what.split()[0] in {hit.kind for hit in vectorscan.scan(text) if hit.blocks}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_never_block(vectorscan, kind):
    assert [(hit.kind, hit.blocks) for hit in vectorscan.scan(LABELS[kind].encode())] == [(kind, False)]


@pytest.mark.parametrize("what", CLEAN)
def test_our_rules_leave_alone(vectorscan, what):
    assert [hit for hit in vectorscan.scan(CLEAN[what].encode()) if hit.blocks] == []


@pytest.mark.parametrize("how", PASSWORDS)
def test_the_value_of_a_password_is_taken(vectorscan, how):
    text = PASSWORDS[how].encode()
    spans = [text[hit.start : hit.end] for hit in vectorscan.scan(text) if hit.blocks]
    assert any(b"Tr0ub4dor-and-3" in span for span in spans)


@pytest.mark.parametrize("word", ["", "card_number: ", "my Visa "])
def test_a_number_in_one_piece_is_a_card_when_a_word_says_so(vectorscan, word):
    hits = [hit for hit in vectorscan.scan(f"{word}4111111111111111".encode()) if hit.kind == "card"]
    assert any(hit.blocks for hit in hits) is bool(word)
    assert hits


@pytest.mark.parametrize("cut", ["end", "beginning"])
def test_a_key_that_was_cut_off_is_taken_to_its_last_line(vectorscan, cut):
    body = "\n".join(["MIIEowIBAAKCAQEAx8vJ2k" + "aB3/" * 10] * 8 + ["Zm9vYmFy"])
    head, tail = "-----BEGIN RSA PRIVATE KEY-----\n", "\n-----END RSA PRIVATE KEY-----"
    for wrap in (
        str,
        lambda text: text.replace("\n", "\\n"),
        lambda text: "\n".join(f"+{line}" for line in text.split("\n")),
    ):
        text = wrap(head + body if cut == "end" else body + tail).encode()
        spans = [(hit.start, hit.end) for hit in vectorscan.scan(text) if hit.kind == "private_key" and hit.blocks]
        covered = b"".join(text[start:end] for start, end in spans)
        assert covered.count(b"MIIEowIBAAKCAQEAx8vJ2k") == 8
        assert b"Zm9vYmFy" in covered


def test_a_whole_key_is_one_hit(vectorscan):
    text = ("-----BEGIN PRIVATE KEY-----\n" + "aB3/" * 16 + "\n-----END PRIVATE KEY-----\n").encode()
    assert [hit.kind for hit in vectorscan.scan(text)] == ["private_key"]


def test_floats_are_no_cards(vectorscan):
    import random

    r = random.Random(3)
    text = repr([r.random() for _ in range(5000)] + [r.randint(10**17, 10**18) for _ in range(2000)]).encode()
    assert [hit for hit in vectorscan.scan(text) if hit.blocks] == []


def test_settings_know_every_kind_that_is_labelled_only():
    from typing import get_args

    from millrace.infra.config import Tenant
    from millrace.streams.refine.detectors.rules import RULES

    known = get_args(get_args(Tenant.model_fields["remove"].annotation)[0])
    labels = {rule.kind for rule in RULES if not rule.blocks or rule.alone}
    assert set(known) == labels | set(structure.KINDS) | {personal.KIND}


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
    guarded = GuardedDetectors(["tests.streams.refine.dying:Dying"], timeout_s=2.0)
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
        GuardedDetectors(["millrace.streams.refine.detectors.base:Nothing"])


@pytest.mark.slow
def test_a_process_that_stands_still_while_it_is_handed_a_text_costs_one_scan():
    before = set(multiprocessing.active_children())
    guarded = GuardedDetectors(["tests.streams.refine.dying:Dying"], timeout_s=5.0)
    try:
        # It reads nothing, and the text is larger than what a pipe takes in.
        (child,) = set(multiprocessing.active_children()) - before
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(DetectorError, match="within"):
            guarded.scan(b"x" * (8 << 20))
        assert guarded.scan(b"abc") == [Hit(0, 3, "all", "dying", True)]
    finally:
        guarded.close()
