"""Federations on one machine or a cluster, with real Flower and Ray.

It plays every party itself, so it may import client and server. Start at `federation.py`.
"""
