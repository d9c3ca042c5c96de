"""The bus and the command line over a broker with TLS and passwords, set up as a user would: by millrace.toml alone."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from millrace.infra.config import Settings, load
from millrace.infra.connect import connect
from millrace.infra.errors import AccessError, ConfigError
from millrace.infra.log.base import EARLIEST, Outgoing, Place, TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import full_name
from millrace.infra.machine.broker import Broker
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.schemas import codec
from millrace.streams.reward.agents import credentials
from millrace.testing.events import Episode

USER, PASSWORD = "millrace", "correct-horse"
GUEST, GUEST_PASSWORD = "guest", "battery-staple"
"""a user who may log in and may do nothing"""
LIMITED, LIMITED_PASSWORD = "limited", "staple-horse"
"""a user who may do what `allow` says"""
RIGHTS = {
    "TOPIC": ("CREATE", "DELETE", "DESCRIBE", "DESCRIBE_CONFIGS", "READ", "WRITE"),
    "GROUP": ("READ", "DESCRIBE"),
    "TRANSACTIONAL_ID": ("WRITE", "DESCRIBE"),
}
"""what docs/operations.md says that Millrace needs, on everything whose name begins like its namespace"""

SECURED = """
listeners=SASL_SSL://{host}:{secured},PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller}
advertised.listeners=SASL_SSL://{host}:{secured},PLAINTEXT://{host}:{port}
listener.security.protocol.map=SASL_SSL:SASL_SSL,PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
ssl.keystore.type=PEM
ssl.keystore.location={keystore}
sasl.enabled.mechanisms=SCRAM-SHA-512,PLAIN
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.sasl_ssl.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
  user_{user}="{password}";
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:{user};User:ANONYMOUS
"""


class SecuredBroker(Broker):
    """Beside its plain listener, which only tests of the broker itself use, one with TLS and SASL (SCRAM or PLAIN).

    `authority` is the file that clients trust. USER may do everything, GUEST nothing."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        (self._port,) = free_ports(1)
        self.address = f"{LOCALHOST}:{self._port}"
        self.authority = self.home / "ca.pem"

    def configuration(self, port: int, controller: int) -> str:
        keystore = self.home / "broker.pem"
        write_certificates(self.authority, keystore)
        names = {"user": USER, "password": PASSWORD, "host": LOCALHOST, "keystore": keystore}
        more = SECURED.format(**names, port=port, controller=controller, secured=self._port)
        return super().configuration(port, controller) + more

    def format_arguments(self) -> list[str]:
        users = ((USER, PASSWORD), (GUEST, GUEST_PASSWORD), (LIMITED, LIMITED_PASSWORD))
        rows = [f"SCRAM-SHA-512=[name={user},password={password}]" for user, password in users]
        return [part for row in rows for part in ("--add-scram", row)]


def allow(admin: AdminClient, user: str, prefix: str) -> None:
    """Grant RIGHTS on names that begin with `prefix`, and on the group of readers that never join."""
    rows = [(kind, prefix, ResourcePatternType.PREFIXED, what) for kind, all in RIGHTS.items() for what in all]
    rows.append(("GROUP", "millrace-readers", ResourcePatternType.LITERAL, "DESCRIBE"))
    acls = [
        AclBinding(
            ResourceType[kind],
            name,
            pattern,
            f"User:{user}",
            "*",
            AclOperation[what],
            AclPermissionType.ALLOW,
        )
        for kind, name, pattern, what in rows
    ]
    for done in admin.create_acls(acls).values():
        done.result(30)


def write_certificates(authority: Path, keystore: Path) -> None:
    """A new authority's certificate, and a key with a certificate of that authority for this machine."""
    root, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer, subject = name("Millrace test authority"), name("localhost")
    signed = (
        certificate(issuer, issuer, root, authority=True).sign(root, hashes.SHA256()),
        certificate(issuer, subject, key, authority=False).sign(root, hashes.SHA256()),
    )
    authority.write_bytes(signed[0].public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    keystore.write_bytes(private + signed[1].public_bytes(serialization.Encoding.PEM))


def name(common: str) -> x509.Name:
    """A name of one part."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def certificate(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, authority: bool
) -> x509.CertificateBuilder:
    """A certificate for a day, still to be signed."""
    now = datetime.datetime.now(datetime.UTC)
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(LOCALHOST))]
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


pytestmark = [pytest.mark.slow, pytest.mark.kafka]

ROOT = Path(__file__).parents[3]
PATIENCE_S = 90
# The lines of docs/operations.md.
FILE = """
namespace = "{namespace}"
home = "home"

[kafka]
bootstrap = "{bootstrap}"
local = false

[kafka.options]
"security.protocol" = "SASL_SSL"
"ssl.ca.location" = "ca.pem"
"sasl.mechanism" = "SCRAM-SHA-512"
"sasl.username" = "{user}"
"sasl.password" = "{password}"

[engine]
local = false
"""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    with SecuredBroker(tmp_path_factory.mktemp("secured")) as running:
        running.start(timeout_s=180)
        yield running


class Machine:
    """A folder with a millrace.toml and the authority's certificate, and commands that are run in it."""

    def __init__(self, folder: Path, broker: SecuredBroker) -> None:
        self.folder = folder
        self.namespace = f"s{uuid.uuid4().hex[:10]}"
        self.file = folder / "millrace.toml"
        names = {"namespace": self.namespace, "bootstrap": broker.address, "user": USER, "password": PASSWORD}
        self.file.write_text(FILE.format(**names))
        (folder / "ca.pem").write_bytes(broker.authority.read_bytes())

    def settings(self, **options: str) -> Settings:
        return load(self.file, {f"kafka.options.{name}": value for name, value in options.items()})

    def limit(self) -> None:
        """From here on it is a user with no more rights than docs/operations.md says are needed."""
        with connect(self.settings()) as bus:
            allow(bus.admin, LIMITED, self.namespace)
        text = self.file.read_text().replace(f'"{USER}"', f'"{LIMITED}"').replace(PASSWORD, LIMITED_PASSWORD)
        self.file.write_text(text)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "millrace.apps.cli.main", *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{arguments[-1]}.log").open("ab") as log:
            return subprocess.Popen(
                self.command(*arguments), cwd=self.folder, env=self.environment(), stdout=log, stderr=log
            )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def machine(tmp_path: Path, secured: SecuredBroker) -> Machine:
    return Machine(tmp_path, secured)


OWNERS = {
    "SCRAM": {},
    "PLAIN": {"sasl.mechanism": "PLAIN"},
    "few rights": {"sasl.username": LIMITED, "sasl.password": LIMITED_PASSWORD},
}


@pytest.mark.parametrize("owner", OWNERS)
def test_the_bus_works_with_tls_and_a_password(machine: Machine, owner: str) -> None:
    name = f"{machine.namespace}.t"
    with connect(machine.settings()) as bus:
        allow(bus.admin, LIMITED, machine.namespace)
    with connect(machine.settings(**OWNERS[owner])) as bus:
        bus.ensure_topics([TopicSpec(name, 1, {"cleanup.policy": "compact"})])
        with bus.publisher() as publisher:
            places = [publisher.publish(Outgoing(name, b"k", b"%d" % n)).result(30) for n in range(3)]
        assert places == [Place(name, 0, n) for n in range(3)]
        assert [record and record.value for record in bus.fetch(places)] == [b"0", b"1", b"2"]
        with bus.transactor(f"{machine.namespace}.x") as transactor, bus.member(f"{name}.g", name) as member:
            polled = []
            deadline = time.monotonic() + PATIENCE_S
            while len(polled) < 3 and time.monotonic() < deadline:
                polled += member.poll(10, 0.1)
            transactor.begin()
            sent = transactor.send(Outgoing(name, b"k", b"answer"))
            transactor.flush()
            transactor.commit({(name, 0): 3}, member.token())
            assert sent.place.offset == 3
            assert member.committed_offsets({0}) == {0: 3}
            (row,) = bus.group(f"{name}.g").members
            assert bus.expel(f"{name}.g", row.member_id) is False
            assert bus.group(f"{name}.g").members == (row,)
        with bus.tail({(name, 0): EARLIEST}) as tail:
            read: list[bytes | None] = []
            while len(read) < 4 and time.monotonic() < deadline:
                read += [record.value for record in tail.poll(10, 0.1)]
        assert read == [b"0", b"1", b"2", b"answer"]
        assert bus.mend() == 0


def test_topics_doctor_and_config(machine: Machine) -> None:
    machine.limit()
    made = machine.run("topics")
    assert made.returncode == 0, made.stderr
    examined = machine.run("doctor")
    assert examined.returncode == 0, examined.stdout
    for question in ("broker", "topics", "clock against the broker"):
        assert f"✓ {question}: " in examined.stdout
    for arguments in (["config"], ["config", "--json"]):
        shown = machine.run(*arguments)
        assert shown.returncode == 0
        assert LIMITED_PASSWORD not in shown.stdout
        assert LIMITED in shown.stdout
    assert json.loads(shown.stdout)["kafka"]["options"]["ssl.ca.location"] == str(machine.folder / "ca.pem")


def test_stages_and_the_reward_role_turn_over_it(machine: Machine) -> None:
    """Raw in by the bus; refine (librdkafka, transactions), reward (faust) and refine again; seal joins the two."""
    machine.limit()
    settings = machine.settings()
    policy = settings.policy.name
    with connect(settings) as bus:
        bus.ensure_topics(settings.layout.specs())
        processes = [machine.start(role) for role in ("refine", "reward", "seal")]
        try:
            episode = Episode(
                "r1", policy=policy, source="gateway-0", task='{"answer": "done"}', wait_ms=PATIENCE_S * 1000
            )
            with bus.publisher() as publisher:
                for n, event in enumerate([episode.start(), episode.call("a"), episode.end()]):
                    headers = {"source": b"gateway-0", "source-seq": b"%d" % n, "kind": event["kind"].encode()}
                    raw = Outgoing(
                        full_name(machine.namespace, "raw"), b"local/r1", codec.encode("Event", event), headers
                    )
                    publisher.publish(raw)
                publisher.flush()
            topic = full_name(machine.namespace, f"{policy}.trajectories")
            deadline = time.monotonic() + PATIENCE_S
            found: list[bytes | None] = []
            while not found and time.monotonic() < deadline:
                time.sleep(0.2)
                found = [record.value for p in range(bus.partitions(topic)) for record in bus.read(topic, p)]
            logs = "\n".join(path.read_text()[-2000:] for path in machine.folder.glob("*.log"))
            assert found, logs
            assert LIMITED_PASSWORD not in logs
            for process in processes:
                process.send_signal(signal.SIGTERM)
            assert [process.wait(120) for process in processes] == [0, 0, 0], logs
        finally:
            for process in processes:
                process.kill()
                process.wait()
    trajectory = codec.decode_as("Trajectory", found[0] or b"")
    assert [(reward["source"], reward["value"]) for reward in trajectory["rewards"]] == [("verifier", 1.0)]


WRONG = {
    "password": ({"sasl.password": "hunter2"}, ['"sasl.password"', "invalid credentials"]),
    "user": ({"sasl.username": "nobody"}, ['"sasl.username"', "invalid credentials"]),
    "mechanism": ({"sasl.mechanism": "SCRAM-SHA-256"}, ['"sasl.mechanism"', "SCRAM-SHA-512,PLAIN"]),
    "authority": ({"ssl.ca.location": "other.pem"}, ['"ssl.ca.location"', "certificate verify failed"]),
    "no file": ({"ssl.ca.location": "/none.pem"}, ["[kafka.options]", "ssl.ca.location"]),
    "name": ({"sasl.usernme": "me"}, ["[kafka.options]", "sasl.usernme"]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_who_is_not_let_in_is_told_why(machine: Machine, wrong: str) -> None:
    options, said = WRONG[wrong]
    write_certificates(machine.folder / "other.pem", machine.folder / "key.pem")
    flags = [part for name, value in options.items() for part in ("--set", f"kafka.options.{name}={value}")]
    for command in ("topics", "doctor"):
        done = machine.run(*flags, command)
        text = done.stdout + done.stderr
        assert done.returncode == 1, text
        assert all(words in text for words in said), text
        assert "Traceback" not in text
        assert "hunter2" not in text


@pytest.mark.parametrize("role", ["refine", "reward", "learn", "gateway", "reload", "rollout", "up", "status", "audit"])
def test_every_command_ends_on_a_wrong_password(machine: Machine, role: str) -> None:
    done = machine.run("--set", "kafka.options.sasl.password=hunter2", "--set", "rollout.agent=os:getcwd", role)
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    assert '"sasl.password" in [kafka.options]' in text
    assert "Traceback" not in text
    assert not (machine.folder / "home" / "supervisor").exists(), "`up` starts nothing that would be left behind"


def test_a_user_without_rights_is_told_so(machine: Machine, secured: SecuredBroker) -> None:
    name = f"{machine.namespace}.closed"
    with connect(machine.settings()) as bus:
        bus.ensure_topics([TopicSpec(name, 1)])
    flags = {"sasl.username": GUEST, "sasl.password": GUEST_PASSWORD}
    done = machine.run(*[part for k, v in flags.items() for part in ("--set", f"kafka.options.{k}={v}")], "topics")
    assert done.returncode == 1
    assert "docs/operations.md" in done.stderr
    assert "Traceback" not in done.stderr
    with KafkaBus(secured.address, machine.settings(**flags).kafka.client_options()) as bus:
        with pytest.raises(AccessError), bus.publisher() as publisher:
            publisher.publish(Outgoing(name, b"k", b"v")).result(30)
        with pytest.raises(AccessError):
            bus.transactor(f"{machine.namespace}.x")


def test_the_reward_role_refuses_what_it_cannot_honour(machine: Machine) -> None:
    options = machine.settings(**{"ssl.ca.location": "/none.pem"}).kafka.client_options()
    with pytest.raises(ConfigError, match="TLS"):
        credentials(options)
    with pytest.raises(ConfigError, match="OAUTHBEARER"):
        credentials({**options, "ssl.ca.location": "", "sasl.mechanism": "OAUTHBEARER"})
