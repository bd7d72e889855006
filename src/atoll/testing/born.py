"""Stands for a copy of the nursery: hands on what it was started with, and ends as the copy does.

Imports nothing that it need not: its own start is all that it costs.
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
