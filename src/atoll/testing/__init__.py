"""The conformance suite of sandboxes, for this package's own drivers and for drivers written elsewhere.

A driver is found through the entry-point group `atoll.drivers`; the suite then runs with its name:

    pip install '/path/to/atoll[testing]'      # the directory of Atoll's sources, or its wheel
    pytest --pyargs atoll.testing.conformance -p atoll.testing.plugin --atoll-runtime NAME

Each test asks for what it needs; what the driver's `Capabilities` do not declare is skipped, or tested to be refused.
A leak check around every test looks for processes, mounts, cgroups, directories and descriptors that were left behind.

Owns the suite (`conformance/`), its pytest plugin (`plugin.py`), and what tests of sandboxes share: `inside.py`,
`leaks.py`, `nursery.py`, `waiting.py`. Above every other layer: nothing in the package imports it.
"""
