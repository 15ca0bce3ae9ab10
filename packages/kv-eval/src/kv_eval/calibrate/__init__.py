"""Calibration of a policy's settings for a model: their cost in answers, their saving in bytes."""
