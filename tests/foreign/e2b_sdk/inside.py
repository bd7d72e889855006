"""Runs E2B's tests against a server, in an internet of their own: `inside.py WAY DIRECTORY TESTS SUITE…`.

`test_suite.py` calls it in new network and mount namespaces. WAY is how the SDK is pointed at the server: `urls` (plain
HTTP) or `domain` (TLS). DIRECTORY gets the server's state, its log, and `outcomes.json`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from internet import DOMAIN, SERVER_ADDRESS, Internet, without_variables

from atoll.testing.server import RunningServer, running_server
from atoll.testing.waiting import BOUND_S

HERE = Path(__file__).parent
SERVER_PYTHON = str(HERE.parents[2] / ".venv/bin/python")
TEST_BOUND_S = 4 * BOUND_S
HTTPBIN = """
import http.server, json
class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        names = {name: self.headers.get_all(name) for name in self.headers}
        body = json.dumps({"headers": names}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("", 8080), Echo).serve_forever()
"""
BUILD = """
import sys
from e2b import Template, wait_for_port
program = sys.argv[1]
template = Template().from_base_image().run_cmd(f"cat > /home/user/httpbin.py <<'END'\\n{program}\\nEND")
Template.build(template.set_start_cmd("python3 /home/user/httpbin.py", wait_for_port(8080)), "httpbin")
"""
"""What the repository of E2B has a template for: a server that answers with the headers that it was sent."""
CLEAN = """
from e2b import Sandbox
left = Sandbox.list()
while left.has_next:
    for each in left.next_items():
        Sandbox.kill(each.sandbox_id)
"""
"""What tests that failed have left."""


def serving(way: str, directory: Path, internet: Internet) -> AbstractContextManager[RunningServer]:
    trusting = {"SSL_CERT_FILE": str(internet.bundle)}
    state = directory / "state"
    if way == "urls":
        return running_server(state, environment=trusting, python=SERVER_PYTHON)
    flags = ("--listen", f"{SERVER_ADDRESS}:443", "--tls-self-signed")
    return running_server(state, *flags, environment={"ATOLL_DOMAIN": DOMAIN} | trusting, python=SERVER_PYTHON)


def main(way: str, directory: Path, tests: Path, suites: list[str]) -> int:
    internet = Internet(directory)
    with serving(way, directory, internet) as server:
        environment = without_variables() | {"E2B_API_KEY": server.key, "E2B_VALIDATE_API_KEY": "false"}
        if way == "urls":
            environment |= {"E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url}
        else:
            internet.trust((directory / "state/server/tls/ca.pem").read_text())
            environment |= {"E2B_DOMAIN": DOMAIN, "SSL_CERT_FILE": str(internet.bundle)}
        environment["E2B_OUTCOMES"] = str(directory / "outcomes.json")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), environment.get("PYTHONPATH")]))
        at_tests = {"cwd": tests.parent, "env": environment}
        subprocess.run([sys.executable, "-c", BUILD, HTTPBIN], check=True, **at_tests)
        options = ["-p", "outcomes", "-p", "no:cacheprovider", "-n", "2", f"--timeout={TEST_BOUND_S:.0f}"]
        options += os.environ.get("E2B_PYTEST_ARGS", "").split()
        # The checkout's own SDK is imported, if it is there: the present directory comes first.
        ran = subprocess.run([sys.executable, "-m", "pytest", *options, *suites], check=False, **at_tests)
        subprocess.run([sys.executable, "-c", CLEAN], check=True, **at_tests)
        return ran.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
