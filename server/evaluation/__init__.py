"""Measuring models on test records, and explaining a merge by public text.

It changes no model. Start at `evaluate.py`.
"""
