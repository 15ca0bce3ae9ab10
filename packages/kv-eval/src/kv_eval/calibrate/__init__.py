"""Finding a policy's settings for a model: what they cost in answers, and what they save."""
