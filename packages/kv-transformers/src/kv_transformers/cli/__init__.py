"""What commands about a model share, and `kv-serve generate`."""
