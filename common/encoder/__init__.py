"""The shared pretrained model: loading it, splitting it at the frozen part, and its heads.

Every forward pass that client and server must do alike is here; gradients of one record are not.
Start at `base_model.py`.
"""
