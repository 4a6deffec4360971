"""Model definitions: pure functions over plain parameter dicts."""
