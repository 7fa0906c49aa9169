"""The private training loop and its sharpness-aware step.

It asks the privatiser for every number that depends on records. Start at `train.py`.
"""
