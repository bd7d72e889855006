"""The protocol of the guest: frames, streams, and the operations on processes, files and ports."""
