"""Evaluation of compressed caches: their cost in answers, their saving in bytes."""
