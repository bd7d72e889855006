"""The contract of every driver, as tests. `atoll.testing` says how to run them."""
