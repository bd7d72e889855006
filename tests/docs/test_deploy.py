"""`docs/deploy.md` is true: its unit, as far as it can be tried without systemd, and its backup."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = f"{sys.executable} -m atoll"
CONFINEMENT = {
    "statedirectory": "atoll",
    "statedirectorymode": "0700",
    "protectsystem": "strict",
    "protecthome": "yes",
    "privatetmp": "yes",
    "nonewprivileges": "yes",
}
CONFINED = """
    set -e
    mount --make-rslave /
    for path in {writable}; do mount --bind $path $path; done
    mount -o remount,bind,ro /
    for path in {writable}; do mount -o remount,bind,rw $path; done
    mount -t tmpfs -o ro tmpfs /home
    exec setpriv --no-new-privs {command}
"""
"""What systemd does for these settings. But `/root` stays, where the Python of the tests may be; and the directory for
temporary files is the machine's, with the state directory in it, and the image may be elsewhere."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the page is about root's state directory")


def blocks(language: str, section: str) -> list[str]:
    page = (ROOT / "docs/deploy.md").read_text()
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE)
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def state(make_state_dir: Callable[[], Path]) -> Path:
    return make_state_dir()


@pytest.fixture
def env(state: Path) -> dict[str, str]:
    return {**os.environ, "ATOLL_STATE_DIR": str(state)}


def test_the_unit_serves_and_its_sandboxes_run_under_its_protection(
    env: dict[str, str], tmp_path: Path, host_images: Path
) -> None:
    (text,) = blocks("ini", "As a service")
    if analyze := shutil.which("systemd-analyze"):
        (tmp_path / "atoll.service").write_text(text.replace("/usr/local/bin/atoll", "/bin/true"))
        verify = [analyze, "verify", str(tmp_path / "atoll.service")]
        assert "atoll.service" not in subprocess.run(verify, capture_output=True, text=True, check=False).stderr
    unit = ConfigParser()
    unit.read_string(text)
    service = dict(unit["Service"])
    command = service.pop("execstart").replace("/usr/local/bin/atoll", PROGRAM).replace(":8000", ":0")
    assert service.pop("restart") == "on-failure"
    settings = Path(service.pop("environmentfile"))
    assert service == CONFINEMENT, "what is tried here is what the page says"

    (commands,) = blocks("sh", "As a service")
    prepare = commands.replace(str(settings.parent), f"{tmp_path}/etc").partition("systemctl")[0]
    subprocess.run(["sh", "-ec", prepare], check=True)
    (name, _, token) = (tmp_path / "etc" / settings.name).read_text().strip().partition("=")

    writable = f"{tempfile.gettempdir()} {host_images}"

    def confined(command: str) -> list[str]:
        return ["unshare", "--mount", "sh", "-c", CONFINED.format(writable=writable, command=command)]

    env[name] = token
    refused = subprocess.run(confined("touch /usr/x"), env=env, capture_output=True, text=True, check=False)
    assert "Read-only file system" in refused.stderr
    ran = subprocess.run(confined(f"{PROGRAM} run -- echo hi"), env=env, capture_output=True, text=True, check=False)
    assert ran.stdout == "hi\n", ran.stderr
    with subprocess.Popen(confined(command), env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with pytest.raises(urllib.error.HTTPError, match="401") as raised:
            urllib.request.urlopen(url, timeout=30)
        raised.value.close()
        server.terminate()


def test_a_backup_brings_sandboxes_back(state: Path, env: dict[str, str], tmp_path: Path) -> None:
    def sh(script: str) -> str:
        here = script.replace("/var/lib/atoll", str(state)).replace("/var/backups", str(tmp_path))
        done = subprocess.run(
            ["sh", "-ec", f'atoll() {{ {PROGRAM} "$@"; }}\n{here}'],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    each, whole, restore = blocks("sh", "Backup")
    sh("atoll volumes create data; atoll create box")
    sh("atoll exec box -u root -c 'echo kept >/root/file; rm /etc/hostname; chown user /root/file'")
    sh(each)
    sh(whole)
    sh("atoll rm box; find /var/lib/atoll -mindepth 1 -delete")
    sh(restore)
    assert sh("atoll exec box -u root -c 'cat /root/file; stat -c %U /root/file; ls /etc/hostname || true'") == (
        "kept\nuser\n"
    )
    assert sh("atoll import /var/backups/atoll/box.tar.zst other; atoll exec other -u root -- cat /root/file") == (
        "other\nkept\n"
    )
    assert (tmp_path / "atoll/data.volume.tar").stat().st_size
    sh("atoll rm box other; atoll volumes rm data")
