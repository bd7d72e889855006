"""What Atoll costs, against what the same machine does without it. `make bench`, or `python -m bench --help`.

`__main__.py` chooses and runs, `lab.py` holds the sandboxes that are measured, `sampling.py` takes times, `results.py`
is what comes out and `render.py` how it looks. Each other module measures one subject and knows none of the others.
"""
