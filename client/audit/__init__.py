"""Attacks on our own mechanism: how much does a membership game really find out?

It trains nothing that is released. Start at `membership_game.py`.
"""
