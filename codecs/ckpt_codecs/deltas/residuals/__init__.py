"""Residuals: the differences between predicted and actual values, as bytes."""
