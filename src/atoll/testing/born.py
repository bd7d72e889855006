"""The client of the nursery: sends it what this process was started with, and exits as the copy exits.

Imports as little as possible: a test pays for the start of this program.
"""

import _socket
import marshal
import os
import sys

_, place, *arguments = sys.argv
nursery = _socket.socket(_socket.AF_UNIX)
nursery.connect(place)
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
request = marshal.dumps((arguments, dict(os.environ), os.getcwd()))
sent = nursery.sendmsg([request], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
nursery.sendall(request[sent:])
nursery.shutdown(_socket.SHUT_WR)
status = int(nursery.recv(16))
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
