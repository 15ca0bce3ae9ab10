"""The compressed cache inside Hugging Face transformers."""
