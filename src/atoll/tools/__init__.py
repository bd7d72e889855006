"""Typed tools over sandboxes, in vocabularies, for models and for every protocol. `vocabularies.py` lists them."""
