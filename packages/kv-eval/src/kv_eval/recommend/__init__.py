"""A search over the installed policies for one that fits a memory and loses little."""
