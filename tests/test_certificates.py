"""TLS by certificates: whom ranks accept, and what is said of a certificate that will not do."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from authority import HERE, Authority, openssl, variables_of
from handshake_client import CHALLENGE_BYTES, hello, key_id_of, tls_name
from harness import make_store, on_gloo, run_ranks, wait_until
from test_encryption import encrypted, encrypted_paths, errors_of, reduce_through_cuts, train
from test_security import listening_ports

from torch_resilient import faults, stats
from torch_resilient._reports.stats import TrustStats
from torch_resilient.cli.secret import write_secret

pytestmark = [
    pytest.mark.skipif(on_gloo(), reason="gloo has no such options"),
    pytest.mark.skipif(
        shutil.which("openssl") is None and not os.environ.get("CI"),
        reason="certificates are made by openssl's command line",
    ),
]


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "job.secret"
    write_secret(path)
    return str(path)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def test_a_training_has_the_same_bits_with_certificates(
    secret_file: str, authority: Authority
) -> None:
    with_secret = encrypted(secret_file)
    plain = run_ranks(train, env=with_secret)
    sealed = run_ranks(train, env={**with_secret, **authority.issue("host")})
    assert [weights for weights, _ in plain] == [weights for weights, _ in sealed]
    assert all(flags and all(flags) for _, flags in sealed)


def test_cut_connections_come_back_with_certificates(
    secret_file: str, authority: Authority
) -> None:
    variables = {**encrypted(secret_file), **authority.issue("host")}
    for reconnects, sealed in run_ranks(reduce_through_cuts, env=variables):
        assert reconnects >= 2
        assert sealed


def work_with(rank: int, each: list[dict[str, str]]) -> TrustStats:
    os.environ.update(each[rank])
    dist.init_process_group("resilient", store=make_store("job"), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1000))
    assert all(encrypted_paths())
    trust = stats().trust
    dist.barrier()
    dist.destroy_process_group()
    return trust


def test_each_host_has_a_certificate_of_its_own(secret_file: str, authority: Authority) -> None:
    each = [
        {**encrypted(secret_file), **authority.issue("first")},
        {**encrypted(secret_file), **authority.issue("second", names=f"IP:192.0.2.7,{HERE}")},
    ]
    for trust in run_ranks(work_with, each, init=False):
        assert trust.certificates
        assert trust.encrypted > 0
        assert not any(trust.faults.to_dict().values())


def start_error(secret_file: str, certificates: Mapping[str, str]) -> str:
    """The error of both ranks, which have these."""
    variables = {**encrypted(secret_file), **certificates}
    first, second = errors_of(variables, variables)
    # The clock may go on in between.
    assert first.partition(" (the clock")[0] == second.partition(" (the clock")[0]
    assert first.startswith("ValueError: ")
    return first


def test_bad_certificates_fail_the_start(
    secret_file: str, authority: Authority, tmp_path: Path
) -> None:
    good = authority.issue("good")
    certificate, key, ca = good.values()
    other = Authority(tmp_path / "other")
    open_key = tmp_path / "open.key"
    open_key.write_text(Path(key).read_text())
    open_key.chmod(0o644)
    locked_key = tmp_path / "locked.key"
    openssl("ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked_key)
    locked_key.chmod(0o600)
    wrong = {
        "cannot read it: No such file": variables_of(tmp_path / "none", key, ca),
        "not a regular file": variables_of(certificate, key, "/dev/zero"),
        "lets other users in: chmod 600": variables_of(certificate, open_key, ca),
        "cannot be used as a certificate in PEM form": variables_of(key, key, ca),
        "in PEM form, without a password": variables_of(certificate, locked_key, ca),
        "not the key of": variables_of(certificate, authority.folder / "ca.key", ca),
        "no certificates of authorities in PEM form": variables_of(certificate, key, key),
        "unable to get local issuer certificate": variables_of(certificate, key, other.certificate),
        "certificate has expired (the clock here says 20": authority.issue("old", days=-1),
        "not for the name of this host": authority.issue("else", names="DNS:another"),
        "need each other": {"TORCH_RESILIENT_TLS_CERT": certificate},
        "makes no use of it": {**good, "TORCH_RESILIENT_ENCRYPTION": "off"},
    }
    for text, variables in wrong.items():
        error = start_error(secret_file, variables)
        assert text in error, (text, error)
        assert "TLS" in error


def test_certificates_need_a_secret(authority: Authority) -> None:
    variables = {**authority.issue("good"), "TORCH_RESILIENT_ENCRYPTION": "required"}
    for error in errors_of(variables, variables):
        assert "needs a secret of the job's own" in error


def test_ranks_must_agree_on_having_certificates(secret_file: str, authority: Authority) -> None:
    without = encrypted(secret_file)
    errors = errors_of({**without, **authority.issue("good")}, without)
    assert any('tls_cert is "' in error and "TORCH_RESILIENT_TLS_CERT" in error for error in errors)


def test_a_host_of_another_authority_is_refused(
    secret_file: str, authority: Authority, tmp_path: Path
) -> None:
    ours = {**encrypted(secret_file), **authority.issue("good")}
    theirs = {**encrypted(secret_file), **Authority(tmp_path / "other").issue("good")}
    errors = errors_of({**ours, "TORCH_RESILIENT_CONNECT_TIMEOUT_S": "3"}, theirs)
    assert any("certificate" in error for error in errors), errors


def knock(rank: int, caller: dict[str, str], protocols: bytes) -> TrustStats:
    """Rank 0's port is called with a certificate and this offer of protocols (ALPN), and without a
    proof of the job's secret."""
    dist.all_reduce(torch.ones(10))
    answer = b""
    if rank == 0:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(caller["TORCH_RESILIENT_TLS_CA"])
        context.load_cert_chain(
            caller["TORCH_RESILIENT_TLS_CERT"], caller["TORCH_RESILIENT_TLS_KEY"]
        )
        # The public method takes text alone.
        if protocols:
            context._set_alpn_protocols(protocols)  # type: ignore[attr-defined]
        (port,) = listening_ports(os.getpid())
        with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
            try:
                with context.wrap_socket(plain) as tls:
                    key_id = key_id_of(b"the secret of another job")
                    tls.sendall(hello(key_id, os.urandom(16), os.urandom(16)))
                    while more := tls.recv(1 << 12):
                        answer += more
            except (ssl.SSLError, ConnectionError):
                pass
        wait_until(lambda: any(stats().trust.faults.to_dict().values()), "it is counted")
    dist.barrier()
    # A refusal without a proof, or nothing.
    assert len(answer) in (0, CHALLENGE_BYTES)
    assert not any(answer[16:])
    return stats().trust


def test_a_certificate_without_the_secret_gets_nowhere(
    secret_file: str, authority: Authority, tmp_path: Path
) -> None:
    variables = {**encrypted(secret_file), **authority.issue("host")}
    secret = Path(secret_file).read_bytes().strip()
    named = b"\x20" + tls_name(secret)
    stranger = authority.issue("stranger")
    # Also without a name, with one that is no secret's, and with more than one.
    for protocols in (named, b"", b"\x20" + os.urandom(32), b"\x02h2" + named):
        trust = run_ranks(knock, stranger, protocols, env=variables)[0]
        assert trust.faults.wrong_secret == 1
    # Nor does one of another authority, and that is another reason.
    foreign = Authority(tmp_path / "foreign").issue("stranger")
    foreign["TORCH_RESILIENT_TLS_CA"] = str(authority.certificate)
    trust = run_ranks(knock, foreign, b"\x20" + tls_name(secret), env=variables)[0]
    assert trust.faults.certificate == 1


def renew(rank: int, each: list[dict[str, str]], revoked: str) -> tuple[int, int]:
    """Connections are cut before and after rank 1's certificate is revoked."""
    os.environ.update(each[rank])
    dist.init_process_group("resilient", store=make_store("job"), rank=rank, world_size=2)
    with faults.inject("cut after_bytes=200000 times=1"):
        for _ in range(4):
            dist.all_reduce(torch.ones(100_000))
    before = stats().trust.faults.certificate
    dist.barrier()
    if rank == 0:
        os.replace(revoked, each[0]["TORCH_RESILIENT_TLS_CA"])
    dist.barrier()
    time.sleep(1.1)  # the files are looked at once a second

    def refused() -> bool:
        return stats().trust.faults.certificate > before

    # It is the only connection, so this does not end.
    with faults.inject("cut after_bytes=100000 times=1"):
        dist.all_reduce(torch.ones(1_000_000), async_op=True)
        wait_until(refused, "a new connection is refused")
    found = stats().trust.faults.certificate
    dist.distributed_c10d._abort_process_group()
    return before, found


def test_a_revoked_certificate_is_refused_while_the_job_runs(
    secret_file: str, authority: Authority, tmp_path: Path
) -> None:
    bundle, revoked = tmp_path / "bundle.pem", tmp_path / "revoked.pem"
    authority.with_list(bundle)
    each = [
        {
            **encrypted(secret_file),
            **authority.issue(host),
            "TORCH_RESILIENT_TLS_CA": str(bundle),
        }
        for host in ("first", "second")
    ]
    authority.revoke(each[1], revoked)
    for before, after in run_ranks(renew, each, str(revoked), init=False):
        assert before == 0
        assert after > 0
