"""Charges as a ledger holds them."""

from dataclasses import asdict


def charge_of(mechanism):
    return asdict(mechanism) | {"epsilon": 1.0}
