"""Gradients of each record by itself, by the cheapest route that a layer allows.

Nothing is clipped, summed over records or given noise here. Start at `per_example.py`.
"""
