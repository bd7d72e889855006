"""What every driver has to keep, as tests. `atoll.testing` says how to run them."""
