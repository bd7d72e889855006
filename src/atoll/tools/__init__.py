"""What a model is offered: typed tools over pools and sandboxes, in three vocabularies, for every protocol."""
