"""A real sshd, on loopback unless another address is given, with keys and a port of its own, which stands for several
hosts. No service of the system is used or changed, and no root is needed. Its sessions have an empty home: what the
user's shell starts with (a tool that waits for a lock of its own, say) has no part in a test."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.harness.pool import free_ports
from tests.harness.slurm import until, which

SERVER = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxStartups 100
SetEnv HOME={folder}/home
"""
CLIENT = """\
Host {names}
  HostName {address}
  Port {port}
  User {user}
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  HostKeyAlias phalanx-test
"""


def missing() -> str:
    """Why there is no sshd here; empty: there can be one."""
    lacking = [name for name in ("sshd", "ssh", "ssh-keygen") if which(name) is None]
    return f"no {', '.join(lacking)}: apt-get install --no-install-recommends openssh-server" if lacking else ""


class Sshd:
    """`ssh`: the command that reaches the hosts `names`. address: where it listens; inside: a command in front of the
    server's."""

    def __init__(self, names: Sequence[str], user: str, address: str = "127.0.0.1", inside: Sequence[str] = ()) -> None:
        self._address = address
        self._place = tempfile.TemporaryDirectory(prefix="sshd-")
        self.folder, self._names, self._user, self._inside = Path(self._place.name), names, user, inside
        self.config = self.folder / "config"
        self.ssh = f"ssh -F {self.config} -o BatchMode=yes -o ConnectTimeout=10"

    def start(self) -> Sshd:
        for name in ("host", "user"):
            self._key(name)
        (self.folder / "home").mkdir()
        (self.folder / "known").write_text(f"phalanx-test {(self.folder / 'host.pub').read_text()}")
        [port] = free_ports(1)
        values = {
            "address": self._address,
            "port": port,
            "folder": self.folder,
            "names": " ".join(self._names),
            "user": self._user,
        }
        (self.folder / "sshd_config").write_text(SERVER.format(**values))
        self.config.write_text(CLIENT.format(**values))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where it keeps its unprivileged part; the package makes it at boot
        self._server = subprocess.Popen(
            [*self._inside, which("sshd") or "sshd", "-D", "-e", "-f", str(self.folder / "sshd_config")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=open(self.folder / "sshd.log", "wb"),
            start_new_session=True,
        )
        until(lambda: "Server listening" in self.said(), self.said)
        return self

    def _key(self, name: str) -> None:
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
        subprocess.run(words, check=True)

    def said(self) -> str:
        return (self.folder / "sshd.log").read_text()

    def close(self) -> None:
        self._server.kill()
        self._server.wait()
        self._place.cleanup()
