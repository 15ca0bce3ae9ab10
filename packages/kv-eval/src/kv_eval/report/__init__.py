"""The results of evaluations, as a page that needs nothing else and as pictures."""
