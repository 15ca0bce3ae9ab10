"""Token formats: how the key and the value of a token become an exact number of bytes."""
