"""A broker that lets nobody in without TLS and a password: certificates, users and rules made for one test run."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

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

from millrace.infra.machine.broker import Broker
from millrace.infra.process.net import LOCALHOST, free_ports

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
