"""The window of newest tokens that stay as the model made them."""
