"""Keep the tokens whose keys have the smallest norm."""
