"""What every other part of Atoll agrees on: data, errors and the driver interface.

Imports nothing of ours. Whatever is here may be used by every layer, so it holds no behaviour that needs a
machine: no files, no processes, no sockets.
"""
