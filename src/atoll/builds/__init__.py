"""Templates: sandboxes whose files were prepared by steps, as an image is built, and kept as a checkpoint.

`plan.py` is what a build is asked for, `dockerfile.py` and `context.py` make one of a directory, `builder.py` runs it.
Used by `atoll build`, the REST API and the E2B surface.
"""
