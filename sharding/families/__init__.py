"""One file per model family, named after its `model_type`; each is mostly tables."""
