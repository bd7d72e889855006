"""The sources of the guest and of its protocol. Nothing here is imported; `atoll/_bin/guest` is built from it."""
