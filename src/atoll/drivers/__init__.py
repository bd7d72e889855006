"""Isolation of sandboxes.

`registry.py` lists the drivers: `oci.py` (crun, runc, runsc) and `bwrap.py`. Both implement `contract.driver.Driver`.
What they share: `bundle.py`, `cgroups.py`, `hostname.py`, `keeper_client.py`, `keeper_command.py`, `layer_store.py`,
`limits.py`, `locks.py`, `machine.py`, `seccomp.py`, `storage.py`, the program in `keeper/`.
"""
