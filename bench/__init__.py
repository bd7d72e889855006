"""Benchmarks of Atoll, compared with the same machine without it. `make bench`, or `python -m bench --help`.

`__main__.py` selects and runs subjects, `lab.py` holds the sandboxes that are measured, `sampling.py` takes times,
`results.py` defines the results and `render.py` shows them. Each other module measures one subject.
"""
