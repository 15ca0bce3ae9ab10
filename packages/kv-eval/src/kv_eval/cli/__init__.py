"""The commands `kv-serve calibrate`, `demo`, `eval`, `inspect` and `report`."""
