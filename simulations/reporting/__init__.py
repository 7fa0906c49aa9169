"""What a run found, as rows, words, charts and one HTML page.

It measures nothing. Start at `results.py`.
"""
