"""Which basis the keys and values of a head are stored in, and how many dimensions they need."""
