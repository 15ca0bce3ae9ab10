"""A tokenizer for models with a vocabulary of about a hundred tokens."""


class Letters:
    """A tokenizer of one token per letter, that marks the start unless told not to."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        start = [1] if add_special_tokens else []
        return start + [3 + ord(letter) % 90 for letter in text[:5] + text[-3:]]
