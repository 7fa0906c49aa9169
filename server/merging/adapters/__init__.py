"""Reading LoRA and DoRA adapters, ours or any PEFT tool's, layer by layer.

It decides nothing about merging them. Start at `deltas.py`.
"""
